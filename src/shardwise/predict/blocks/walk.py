"""One walk of a block's program: forward, backward, and forward without gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from weakref import ref

from shardwise.predict.blocks import split_layers
from shardwise.predict.blocks.live import Live, PartMemory, live_of
from shardwise.predict.blocks.scene import Scene
from shardwise.predict.blocks.setting import Layers, Mode, Setting
from shardwise.predict.blocks.tape import ACTIVATION, TEMPORARY, Leaf, Memory, Tape, Tensor

Program = Callable[[Scene, Tensor], Tensor]
"""A block's forward: its input -> its output."""

CHEAP_INNER = 256
"""Inner dimension up to which `selective` computes a matrix product again (`engine.checkpointing`)."""


def walk(
    program: Program,
    layers: Layers,
    setting: Setting,
    mode: Mode,
    *,
    first: bool,
    frozen: bool,
    offload: bool,
    beside: int = 0,
) -> PartMemory:
    """Walk one block.

    Args:
        program: Its forward.
        layers: Its parameters.
        setting: The plan.
        mode: What it computes again in backward.
        first: It is the model's first: under sequence parallelism it is given the whole sequence.
        frozen: No gradient flows into its input.
        offload: What it saves travels to the host.
        beside: Bytes of what the block before has returned beside hidden states, unless it keeps them.
    """
    memory = Memory()
    tape = Tape(memory)
    tape.adds_gradients = setting.adds_gradients
    if mode in ("selective", "every_second_matmul"):
        tape.keeps = _keeps(mode)
    scene = Scene(tape, layers, setting)
    tokens = setting.tokens if first else setting.own_tokens
    size, item = tokens * layers.hidden, setting.stream(layers.norm)
    if first and setting.sequence_parallel:
        program = partial(_on_own_part, program)
    inputs = [tape.new(size, item, None if frozen else Leaf(TEMPORARY), ACTIVATION)]
    run = program if mode == "none" else partial(_checkpointed, program)
    before = tape.new(beside if mode != "none" else 0, 1)
    output = run(scene, inputs[0])
    del before
    given = ref(inputs.pop().storage)
    forward, root = live_of(memory.at_peak), output.node
    kept, keeps_input = memory.now - output.storage.size, given() is not None
    del output
    travelling = max(kept - tape.stays, 0) if offload and setting.device == "cuda" else 0
    backward = Live()
    if root is not None:
        memory.reset()
        tape.backward(root, setting.own_tokens * layers.hidden, item)
        backward = live_of(memory.at_peak)
    return PartMemory(
        kept=kept - travelling,
        travelling=travelling,
        keeps_input=keeps_input,
        output=setting.own_tokens * layers.hidden * item,
        input_gradient=0 if frozen else size * item,
        forward=forward,
        backward=backward,
        evaluation=evaluate(program, layers, setting, tokens, beside),
        work=tape.phases.work(),
    )


def _checkpointed(program: Program, scene: Scene, x: Tensor) -> Tensor:
    """Run the block so that it keeps its input alone."""
    reentrant = scene.setting.program.reentrant
    return scene.tape.checkpointed(lambda: program(scene, x), scene.setting.device, reentrant=reentrant)


def _on_own_part(program: Program, scene: Scene, x: Tensor) -> Tensor:
    """A block's forward on this rank's part of the sequence that it is given."""
    return program(scene, split_layers.own_part(scene, x))


def evaluated(setting: Setting) -> Setting:
    """Return the setting of a forward without gradients, of as many rows."""
    return replace(setting, training=False)


def evaluate(program: Program, layers: Layers, setting: Setting, tokens: int, beside: int) -> Live:
    """Return the highest instant of a forward without gradients, of a block that is given so many tokens."""
    memory, setting = Memory(), evaluated(setting)
    tape = Tape(memory, recording=False)
    item, before = setting.stream(layers.norm), tape.new(beside, 1)
    program(Scene(tape, layers, setting), tape.new(tokens * layers.hidden, item, None, ACTIVATION))
    del before
    return live_of(memory.at_peak)


def _keeps(mode: Mode) -> Callable[[str, int, int], bool]:
    def keeps(name: str, inner: int, place: int) -> bool:
        if name == "attention":
            return True
        return inner > CHEAP_INNER if mode == "selective" else place % 2 == 1

    return keeps
