"""What blocks and ends have to compute, against every operation of real steps of small transformers models."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predict.block_cases import FAMILIES, LENGTH, ROWS, SHARDWISE, VOCAB, parts_of, plan, workload
from predict.blocks_truth import build
from predict.test_blocks import COMBINATIONS, EAGER_ONLY, LORA, fitted
from predict.work_truth import Seen, Sizes, ordered, watch
from shardwise.predict.blocks import computation
from shardwise.predict.blocks.setting import Mode
from shardwise.predict.tensor_axis import NORMS, TensorWork, tensor_exchanges
from shardwise.predict.throughput import flops_of_step
from shardwise.predict.work import AttentionWork, Exchange, PartWork, Product, Work
from shardwise.spec.collectives import Key
from shardwise.spec.layout import Mesh
from shardwise.spec.method import Lora
from shardwise.spec.runtime import Runtime

OPERATIONS, MOVED = 0.1, 0.03
"""What the number of operations of a Llama block, and the bytes that they move, may be off."""

UNEVEN = {"deepseek_v3": 0.004, "deepseek_v2": 0.004}
"""Families whose experts do not share the tokens of these tests evenly: equal shares are rounded up."""


def works(config: dict[str, Any], chosen: Any, lora: Lora | None = None) -> dict[str, PartWork]:
    """Return the work of every part of a model."""
    parts = parts_of(computation(workload(config, lora), SHARDWISE, "cpu"), chosen)
    return {name: part.work for name, part in parts.items()}


def sizes_of(work: Work) -> Counter[Sizes]:
    """Return the matrix products of some work, as the truth names them."""
    counts: Counter[Sizes] = Counter()
    for made, count in work.products:
        counts[ordered(made.batch, made.rows, made.inner, made.columns)] += count
    return counts


def both(config: dict[str, Any], lora: Lora | None = None, **changes: Any) -> list[tuple[str, Work, Seen]]:
    """Return what the formulas and a real step say of every part's forward and backward."""
    chosen = plan(**changes)
    real = watch(build(config, chosen, lora), ROWS, LENGTH, VOCAB)
    found: list[tuple[str, Work, Seen]] = []
    for name, part in works(config, chosen, lora).items():
        found.append((name, part.forward, real[name]))
        found.append((f"{name} backward", part.backward, real.pop(f"{name} backward", Seen())))
    return found


def assert_products(family: str, config: dict[str, Any], **combination: Any) -> None:
    """Compare every matrix product of a step: their sizes, how often each, and FLOPs."""
    for name, work, seen in both(config, **combination):
        assert sizes_of(work) == seen.products, (name, combination)
        assert _of_products(work) == pytest.approx(seen.product_flops, rel=UNEVEN.get(family, 1e-12)), (
            name,
            combination,
        )


@pytest.mark.parametrize("place", range(len(FAMILIES)), ids=list(FAMILIES))
def test_products_of_every_family(place: int):
    """Each family in one of the combinations of full and adapters, checkpointing, dtype and attention."""
    family = list(FAMILIES)[place]
    assert_products(family, FAMILIES[family], **fitted(family, COMBINATIONS[place % len(COMBINATIONS)]))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_products_of_every_family_in_every_combination(family: str):
    for combination in COMBINATIONS:
        assert_products(family, FAMILIES[family], **fitted(family, combination))


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_head": "chunked", "loss_chunk": 64},
        {"loss_head": "chunked", "loss_chunk": 50, "lora": LORA, "activation_checkpointing": "every_2"},
        {"lora": Lora(rank=5, dropout=0.1, targets=("q_proj", "down_proj"), modules_to_save=("lm_head",))},
    ],
    ids=["chunks", "chunks beside adapters", "dropout, a whole head"],
)
def test_what_else_changes_products(changes: dict[str, Any]):
    assert_products("llama", FAMILIES["llama"], **changes)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "adapters"])
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_operations_and_bytes_of_llama(checkpointing: str, lora: Lora | None):
    for name, work, seen in both(FAMILIES["llama"], lora, activation_checkpointing=checkpointing):
        if not name.startswith("embedding"):  # tables of positions are made there, by operations of no size
            assert work.operations == pytest.approx(seen.operations, rel=OPERATIONS), name
            assert work.moved == pytest.approx(seen.moved, rel=MOVED), name


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_operations_and_bytes_of_every_family(family: str):
    for name, work, seen in both(FAMILIES[family], **fitted(family, COMBINATIONS[0])):
        if name.startswith("block"):
            assert work.operations == pytest.approx(seen.operations, rel=0.2), name
            assert work.moved == pytest.approx(seen.moved, rel=0.1), name


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "starcoder2"])
def test_causal_attention_is_half_of_the_square(family: str):
    """torch's counter has the whole square: LENGTH^2 pairs a head, of which a causal kernel looks at L (L + 1) / 2."""
    share = (LENGTH + 1) / (2 * LENGTH)
    for name, work, seen in both(FAMILIES[family], activation_checkpointing="full"):
        executed = sum(call.flops * count for call, count in work.attention)
        assert executed == pytest.approx(share * seen.attention_flops, rel=1e-12), name
        assert name.startswith("block") == (executed > 0)


def test_a_mask_leaves_no_half():
    """A window is a mask for sdpa: its kernels look at the whole square."""
    for _, work, seen in both(FAMILIES["mistral, window"]):
        assert sum(call.flops * count for call, count in work.attention) == seen.attention_flops


def test_a_window_of_flash_attention():
    """33 of 70 tokens: 33 rows see 1 .. 33 of them, 37 rows see 33; 6 heads of 16, 3 rows, 2 products of 2 FLOPs."""
    pairs = 33 * 34 // 2 + 37 * 33
    work = computation(workload(FAMILIES["mistral, window"]), SHARDWISE, "cuda", "ampere")
    part = work.block(plan(attention="flash_attention_2"), 0, checkpointing="none").work
    ((call, count),) = part.forward.attention
    assert (call.flops, count) == (2 * 2 * ROWS * 6 * 16 * pairs, 1)
    ((back, _),) = part.backward.attention
    assert back.flops * 2 == call.flops * 5


def test_what_a_frozen_first_block_leaves_out():
    """Below its first adapter no gradient flows: q, k and v give none to the input, nor do their norm's operations."""
    computed = computation(workload(FAMILIES["llama"], LORA), SHARDWISE, "cuda")
    first = computed.block(plan(), 0, checkpointing="none", first=True).work
    other = computed.block(plan(), 0, checkpointing="none").work
    assert first.forward == other.forward
    tokens = ROWS * LENGTH
    missing = sizes_of(other.backward) - sizes_of(first.backward)
    into = Counter({ordered(1, tokens, 96, 96): 1, ordered(1, tokens, 32, 96): 2, ordered(1, tokens, 4, 96): 3})
    assert missing == into


def test_adapters_have_no_gradients_of_frozen_weights():
    """No product sums over tokens but those of A [4, inputs] and B [outputs, 4]."""
    part = computation(workload(FAMILIES["llama"], LORA), SHARDWISE, "cuda").block(plan(), 0, checkpointing="none")
    of_weights = [made for made, _ in part.work.backward.products if made.inner == ROWS * LENGTH]
    assert of_weights
    assert all(4 in (made.rows, made.columns) for made in of_weights)


def test_recomputation_is_counted_apart():
    """Full checkpointing runs all of forward again but its last product; `again` is part of backward."""
    computed = computation(workload(FAMILIES["llama"]), SHARDWISE, "cuda")
    plain = computed.block(plan(), 0, checkpointing="none").work
    full = computed.block(plan(), 0, checkpointing="full").work
    selective = computed.block(plan(), 0, checkpointing="selective").work
    assert plain.again == Work()
    assert full.forward == selective.forward == plain.forward
    down = Product(ROWS * LENGTH, 200, 96, 2)
    assert full.again.flops == plain.forward.flops - down.flops
    assert full.backward.flops == plain.backward.flops + full.again.flops
    assert selective.again.attention == ()
    assert 0 < selective.again.operations < full.again.operations


def test_selective_recomputation_keeps_wide_products():
    """Inner dimensions above 256 are kept, those up to it computed again: at a width of 512 none is."""
    config = {**FAMILIES["llama"], "hidden_size": 512, "num_attention_heads": 32, "intermediate_size": 1024}
    part = computation(workload(config), SHARDWISE, "cuda").block(plan(), 0, checkpointing="selective")
    assert [made.inner for made, _ in part.work.again.products] == []
    assert part.work.again.moved > 0


def test_compiled_chains_are_one_operation():
    """Without: 7 products, attention, 2 x 7 of norms, 2 x 5 of rotary positions with 2 copies more, 4 others."""
    work = workload(FAMILIES["llama"])
    plain = computation(work, SHARDWISE, "cuda").block(plan(), 0, checkpointing="none").work
    compiled = computation(work, Runtime(compiled=True), "cuda").block(plan(), 0, checkpointing="none").work
    assert compiled.forward.products == plain.forward.products
    assert compiled.forward.operations == 7 + 1 + 2 + 2 + 1 + 2
    assert compiled.forward.moved < plain.forward.moved / 2
    assert compiled.backward.operations < plain.backward.operations / 2


def test_fused_norms_are_one_operation():
    """A norm written out is 7 operations in forward: two casts, square, mean, sum, root, two products."""
    work = workload(FAMILIES["llama"])
    plain = computation(work, SHARDWISE, "cuda").block(plan(), 0, checkpointing="none").work
    fused = computation(work, Runtime(fused_norms=True), "cuda").block(plan(), 0, checkpointing="none").work
    assert plain.forward.operations - fused.forward.operations == 2 * (8 - 1)


def test_a_quantised_base_is_unpacked_in_forward_and_in_backward():
    """Each of 7 frozen matrices is read packed (half a byte a weight and 4 bytes for 64) and written in bf16."""
    work, packed = workload(FAMILIES["llama"], LORA), Runtime(base_quantization="nf4")
    quantised = computation(work, packed, "cuda").block(plan(), 0, checkpointing="none").work
    plain = computation(work, SHARDWISE, "cuda").block(plan(), 0, checkpointing="none").work
    weights = 2 * 96 * 96 + 2 * 96 * 32 + 3 * 96 * 200
    traffic = weights * (0.5 + 4 / 64 + 2)
    for phase in ("forward", "backward"):
        more = getattr(quantised, phase).moved - getattr(plain, phase).moved
        assert more == pytest.approx(traffic, abs=7)
        assert getattr(quantised, phase).operations - getattr(plain, phase).operations == 7


def test_linear_layers_in_fp8():
    """One byte an element in the 3 x 7 products of a block, not in the head; 2 + 3 operands are read twice and cast."""
    work = workload(FAMILIES["llama"])
    wide = computation(work, SHARDWISE, "cuda")
    narrow = computation(work, Runtime(fp8_linears=True), "cuda")
    part, plain = (one.block(plan(), 0, checkpointing="none").work for one in (narrow, wide))
    for phase, operands in (("forward", 2), ("backward", 3)):
        found, before = getattr(part, phase), getattr(plain, phase)
        assert {made.item for made, _ in found.products} == {1}
        assert found.flops == before.flops
        assert found.operations - before.operations == 7 * operands * 2
    tokens, weights = ROWS * LENGTH, 2 * 96 * 96 + 2 * 96 * 32 + 3 * 96 * 200
    taken = tokens * (6 * 96 + 200)
    assert part.forward.moved - plain.forward.moved == (weights + taken) * (2 + 2 + 1)
    assert narrow.ends(plan()).head.work == wide.ends(plan()).head.work


def test_every_piece_of_a_chunked_loss_is_counted():
    """On a GPU four pieces stand for all in memory, not in work: products are those of a CPU, where all are walked."""
    work, chosen = workload(FAMILIES["llama"]), plan(loss_head="chunked", loss_chunk=16)
    on_gpu = computation(work, SHARDWISE, "cuda").ends(chosen).head.work
    on_cpu = computation(work, SHARDWISE, "cpu").ends(chosen).head.work
    for phase in ("forward", "backward", "again"):
        assert Counter(dict(getattr(on_gpu, phase).products)) == Counter(dict(getattr(on_cpu, phase).products))
    assert on_gpu.backward.operations == on_cpu.backward.operations
    assert dict(on_gpu.again.products)[Product(16, 96, VOCAB, 2)] == ROWS * (LENGTH - 1) // 16


def test_a_fused_loss_computes_gradients_in_forward():
    """Logits once, and from their gradient those of hidden states and of the weight: three products of equal FLOPs."""
    head = computation(workload(FAMILIES["llama"]), SHARDWISE, "cuda").ends(plan(loss_head="fused")).head.work
    assert head.forward.flops == 3 * 2 * ROWS * (LENGTH - 1) * 96 * VOCAB
    assert head.backward.flops == 0


def test_equal_experts():
    """2 of 4 experts for each of 210 tokens: 105 a piece, in one product of four."""
    part = computation(workload(FAMILIES["mixtral"]), SHARDWISE, "cuda").block(plan(), 0, checkpointing="none").work
    products = dict(part.forward.products)
    assert products[Product(105, 96, 160, 2, 4)] == products[Product(105, 80, 96, 2, 4)] == 1
    assert Product(105, 96, 160, 2, 4).flops == 2 * 420 * 96 * 160


def test_eager_attention_is_products_and_moves():
    config = FAMILIES["llama"]
    part = computation(workload(config), SHARDWISE, "cuda").block(plan(attention="eager"), 0, checkpointing="none").work
    assert part.forward.attention == part.backward.attention == ()
    assert dict(part.forward.products)[Product(LENGTH, 16, LENGTH, 2, ROWS * 6)] == 1
    assert dict(part.forward.products)[Product(LENGTH, LENGTH, 16, 2, ROWS * 6)] == 1


@given(rows=st.integers(1, 9), checkpointing=st.sampled_from(["none", "full", "selective"]))
@settings(max_examples=20, deadline=None)
def test_work_is_proportional_to_rows(rows: int, checkpointing: Mode):
    """FLOPs exactly; as many operations, whatever their size."""
    computed = computation(workload(FAMILIES["llama"]), SHARDWISE, "cuda")
    one = computed.block(plan(micro_batch=1), 0, checkpointing=checkpointing).work
    several = computed.block(plan(micro_batch=rows), 0, checkpointing=checkpointing).work
    for phase in ("forward", "backward", "again"):
        assert getattr(several, phase).flops == rows * getattr(one, phase).flops
        assert getattr(several, phase).operations == getattr(one, phase).operations


def test_ranks_of_a_tensor_axis_share_products_and_attention():
    work = workload({**FAMILIES["llama"], "num_key_value_heads": 6})
    whole = computation(work, SHARDWISE, "cuda").block(plan(), 0, checkpointing="none").work
    for sequence in (False, True):
        chosen = plan(mesh=Mesh(tensor=2, sequence_parallel=sequence))
        split = computation(work, SHARDWISE, "cuda").block(chosen, 0, checkpointing="none").work
        assert 2 * split.forward.flops == whole.forward.flops
        assert 2 * split.backward.flops == whole.backward.flops


def test_blocks_share_what_they_compute():
    computed, chosen = computation(workload(FAMILIES["llama"]), SHARDWISE, "cuda"), plan()
    again = computed.block(chosen, 0, checkpointing="full").work
    assert computed.block(plan(), 0, checkpointing="full").work is again


EVEN = {**FAMILIES["llama"], "vocab_size": 332}
"""A vocabulary that two ranks can share; the small models' own they cannot."""


@pytest.mark.parametrize("checkpointing", ["none", "full", "every_2"])
@pytest.mark.parametrize("vocab", [331, 332])
@pytest.mark.parametrize("sequence", [False, True], ids=["whole sequences", "parts of sequences"])
def test_exchanges_are_those_of_the_tensor_axis(sequence: bool, vocab: int, checkpointing: str):
    """Sums over all parts are what `tensor_exchanges` counts, but for gradients of norms, which are not computing."""
    mesh = Mesh(tensor=2, sequence_parallel=sequence)
    chosen = plan(mesh=mesh, activation_checkpointing=checkpointing)
    counts: Counter[Key] = Counter()
    for part in works({**EVEN, "vocab_size": vocab}, chosen).values():
        for exchange, count in (*part.forward.exchanges, *part.backward.exchanges):
            counts[exchange.kind, "tensor", exchange.bytes] += count
    tokens = ROWS * LENGTH
    tensor = TensorWork(
        tokens=(tokens,),
        padded_tokens=(tokens + (-LENGTH % 2) * ROWS if sequence else tokens,),
        hidden=96,
        blocks=3,
        checkpointed_blocks={"none": 0, "full": 3, "every_2": 2}[checkpointing],
        vocabulary=vocab if vocab == 332 else None,
    )
    expected = tensor_exchanges(chosen, tensor)
    if sequence:
        expected["all_reduce", "tensor", 96 * 2] -= NORMS * 3 + 1
    assert counts == +expected


def test_model_flops_are_those_of_the_products():
    """What MFU counts of products (6 a weight and token, the head's too) is computed, what is done again apart; of
    attention it counts the whole square 3 times: 3 blocks, 6 heads of 16, two products of 2 FLOPs."""
    chosen, config = plan(activation_checkpointing="full"), FAMILIES["llama"]
    parts = works(config, chosen).values()
    done = sum(_of_products(part.forward) + _of_products(part.backward) - _of_products(part.again) for part in parts)
    attention = 3 * 3 * 2 * 2 * 6 * 16 * LENGTH * ROWS * LENGTH
    assert flops_of_step(workload(config), chosen).model == done + attention


def _of_products(work: Work) -> int:
    return sum(made.flops * count for made, count in work.products)


def test_totals():
    """2 products of 2 x 3 x 4 (48 FLOPs, 2 bytes for 6 + 12 + 8), attention of 10, two moves of 7, one of 5."""
    work = Work(
        products=((Product(2, 3, 4, 2), 2),),
        attention=((AttentionWork(10, "flash", False, 2, 1), 1),),
        moves=((7, 2), (5, 1)),
        exchanges=((Exchange("all_reduce", 100), 3),),
    )
    assert Product(2, 3, 4, 2).flops == 48
    assert Product(2, 3, 4, 2, 5).moved == 5 * 2 * (6 + 12 + 8)
    assert (work.flops, work.moved, work.operations) == (2 * 48 + 10, 19, 2 + 1 + 3 + 3)


def test_families_that_are_eager_have_no_kernels():
    for family in EAGER_ONLY:
        chosen = plan(attention="eager")
        assert all(not part.forward.attention for part in works(FAMILIES[family], chosen).values())
