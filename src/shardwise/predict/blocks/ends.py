"""What is not a block: embedding, tables for all blocks, last norm, head and loss."""

from __future__ import annotations

from shardwise.predict.blocks import latent, ops, rotary, split_layers
from shardwise.predict.blocks.families import Family
from shardwise.predict.blocks.live import EndsMemory, Live, PartMemory, live_of
from shardwise.predict.blocks.loss import End, Loss, loss_program
from shardwise.predict.blocks.scene import Scene
from shardwise.predict.blocks.setting import Layers, Setting
from shardwise.predict.blocks.tape import ACTIVATION, TEMPORARY, UNCOUNTED, Leaf, Memory, Storage, Tape, Tensor
from shardwise.predict.blocks.walk import evaluated
from shardwise.spec.model_spec import ModelSpec


def walk_ends(
    family: Family,
    layers: Layers,
    model: ModelSpec,
    setting: Setting,
    *,
    loss: Loss,
    chunk: int,
    output: int,
    again: bool,
) -> EndsMemory:
    """Walk embedding and head.

    Args:
        family: The model's programs.
        layers: Parameters outside blocks.
        model: The model.
        setting: The plan.
        loss: How logits become a loss.
        chunk: Tokens per piece of a chunked loss.
        output: Bytes of an element of the logits that leave the model.
        again: Some blocks compute again in backward.
    """
    shared, in_forward = _shared(family, model, setting, again=again)
    embedding = _embedding(family, layers, model, setting)
    held = 0
    if family.positions or family.first_norm:
        held = (setting.tokens + _positions(family, setting)) * model.hidden * setting.item
    saved = family.first_norm and embedding.kept  # the first norm's input, which is what the variable holds
    return EndsMemory(
        inputs=3 * ops.WORD * setting.tokens,
        shared=shared,
        in_forward=in_forward + (0 if saved else held),
        in_evaluation=shared + in_forward + held,
        carried=0 if family.positions or family.first_norm else embedding.output,
        embedding=embedding,
        head=_head(family, layers, model, setting, loss, chunk, output),
    )


def _shared(family: Family, model: ModelSpec, setting: Setting, *, again: bool) -> tuple[int, int]:
    """Bytes that blocks are given beside their input: what backward needs too, and what it does not.

    Adding a mask to scores leaves nothing for backward; `again`: blocks that run again need it.
    """
    length, attention = setting.padded_length, model.kinds[0].attention
    windows = {kind.attention.window for kind in model.kinds}
    tables, scores = 0, setting.rows * length**2
    if family.tables:
        head = latent.rotary_dim(model.config) if attention.kind == "latent" else attention.head_dim
        width = int(head * rotary.share(model.config, family.turns))
        item = ops.FLOAT if family.tables_in_fp32 else setting.item
        tables = min(family.tables, len(windows)) * 2 * length * width * item
    biases = {
        "": 0,
        "rows": setting.rows * attention.heads * length * setting.item,
        "heads": attention.heads * length * ops.FLOAT,
    }[family.biases]
    if family.fills_masks:
        return (tables + scores + biases, 0) if again else (tables + scores, biases)
    if setting.attention == "eager":
        size, used = scores * setting.item, len(windows)
        made = max(family.masks, used)
    else:
        always = setting.padded or family.always_masked
        size, used = scores, sum(always or (at is not None and length >= at) for at in windows)
        made = used + family.idle_masks
    masks = (used * size, (made - used) * size) if again else (0, made * size)
    return (tables + masks[0] + biases, masks[1]) if again else (tables, masks[1] + biases)


def _embedding(family: Family, layers: Layers, model: ModelSpec, setting: Setting) -> PartMemory:
    """From token ids to hidden states."""
    memory = Memory()
    tape = Tape(memory)
    tape.adds_gradients = setting.adds_gradients
    scene = Scene(tape, layers, setting)
    out = _embedded(family, scene, model)
    forward, size, root = live_of(memory.at_peak), out.storage.size, out.node
    kept = memory.now - size
    if model.tied:
        _head_was_here(scene.parameter(f"{model.embedding}.weight"))
    del out
    backward = Live()
    if root is not None:
        memory.reset()
        tape.backward(root, setting.tokens * model.hidden, setting.item)
        backward = live_of(memory.at_peak)
    seen = Memory()
    _embedded(family, Scene(Tape(seen, recording=False), layers, evaluated(setting)), model)
    return PartMemory(
        kept=kept,
        travelling=0,
        keeps_input=False,
        output=size,
        input_gradient=0,
        forward=forward,
        backward=backward,
        evaluation=live_of(seen.at_peak),
        work=tape.phases.work(),
    )


def _head_was_here(table: Tensor) -> None:
    """Let the gradient of a tied head, counted there, wait for that of the embedding: a view, so their sum is new."""
    if table.node is not None:
        waiting = Storage(table.storage.memory, 0, UNCOUNTED)
        waiting.waiting = 1
        table.node.grad = Tensor(waiting, table.elements, table.item, viewed=True)


def _positions(family: Family, setting: Setting) -> int:
    """Rows that are looked up in the table of positions."""
    if not family.positions:
        return 0
    return setting.tokens if family.positions_per_row else setting.length


def _embedded(family: Family, scene: Scene, model: ModelSpec) -> Tensor:
    """The hidden states that the first block is given."""
    tape, tokens = scene.tape, scene.setting.tokens
    table = scene.parameter(f"{model.embedding}.weight")
    embedded = ops.lookup(tape, table, tokens, table.elements // model.vocab)
    if scene.layers.sites[model.embedding].word is not None:
        embedded = split_layers.tape_sum(tape, embedded)
    if family.embedding == "scaled":
        return ops.scale(tape, embedded)
    if family.first_norm:
        embedded = scene.norm(family.first_norm, embedded)
    if family.positions:
        places = _positions(family, scene.setting)
        positions = ops.lookup(tape, scene.parameter(family.positions), places, model.hidden, own_numbers=True)
        embedded = ops.add(tape, embedded, positions)
    return scene.drop(embedded, scene.rate(*family.drops))


def _head(
    family: Family, layers: Layers, model: ModelSpec, setting: Setting, loss: Loss, chunk: int, output: int
) -> PartMemory:
    memory = Memory()
    tape = Tape(memory)
    tape.adds_gradients = setting.adds_gradients
    scene = Scene(tape, layers, setting)
    program = loss_program(loss, family, model, chunk, output)
    size = setting.own_tokens * model.hidden
    inputs = [tape.new(size, setting.stream(layers.norm), Leaf(TEMPORARY), ACTIVATION)]
    made = program(scene, inputs)
    forward, root = live_of(memory.at_peak), made.node
    kept = memory.now - made.storage.size
    del made
    assert root is not None
    memory.reset()
    tape.backward(root, 1, ops.FLOAT)
    backward = live_of(memory.at_peak)
    return PartMemory(
        kept=kept,
        travelling=0,
        keeps_input=False,
        output=ops.FLOAT,
        input_gradient=size * setting.item,
        forward=forward,
        backward=backward,
        evaluation=_evaluated(layers, setting, model.hidden, loss_program(loss, family, model, chunk, output)),
        work=tape.phases.work(),
    )


def _evaluated(layers: Layers, setting: Setting, hidden: int, program: End) -> Live:
    """Return the highest instant of the head without gradients."""
    memory, setting = Memory(), evaluated(setting)
    tape = Tape(memory, recording=False)
    program(Scene(tape, layers, setting), [tape.new(setting.own_tokens * hidden, setting.item, None, ACTIVATION)])
    return live_of(memory.at_peak)
