"""Activations, temporaries and gradients of blocks by formula, against what transformers models really allocate."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from typing import Any

import pytest

from predict.block_cases import FAMILIES, LENGTH, ROWS, SHARDWISE, VOCAB, levels, plan, tiny, workload
from predict.blocks_truth import build, measure, measure_evaluation
from shardwise.engine.blocks import find_blocks
from shardwise.predict.blocks import computation
from shardwise.spec.layout import Offload
from shardwise.spec.method import Lora
from shardwise.spec.problems import BadInput
from shardwise.spec.runtime import Runtime

PEAK, PART, KEPT = 0.02, 0.025, 0.005
"""What the peak of forward or backward, the highest level of any part, and what is kept for backward may be off."""

LORA = Lora(rank=4)

COMBINATIONS = [
    {"lora": lora, "activation_checkpointing": setting, "param": param, "attention": attention}
    for setting, lora, param, attention in product(
        ("none", "full", "selective"), (None, LORA), ("bf16", "fp32"), ("sdpa", "eager")
    )
]

FUSED_ONLY, EAGER_ONLY = ("gpt2, dropout",), ("gemma2", "bloom", "mpt")
NO_ADAPTERS = ("deepseek_v3", "deepseek_v2", "falcon", "falcon, new")
"""PEFT turns adapters on all linear layers of these into adapters on fused experts, or finds no plain linear layers."""


def fitted(family: str, combination: dict[str, Any]) -> dict[str, Any]:
    """Return a combination as far as the family takes it."""
    changed = dict(combination)
    if family in EAGER_ONLY:
        changed["attention"] = "eager"
    if family in NO_ADAPTERS:
        changed["lora"] = None
    return changed


def assert_right(config: dict[str, Any], *, lora: Lora | None = None, rows: int = ROWS, **changes: Any) -> None:
    """Compare every part of a step with what is measured."""
    chosen = plan(micro_batch=rows, **changes)
    real = measure(build(config, chosen, lora), rows, LENGTH, VOCAB)
    found = levels(workload(config, lora), chosen)
    del real["embedding"]  # tables and masks are made there, by temporaries of no size that matters
    assert_levels(real, found)


def assert_levels(real: dict[str, int], found: dict[str, int]) -> None:
    """Check levels by part."""
    errors = {part: found.get(part, 0) / size - 1 for part, size in real.items()}
    assert len(errors) > 6
    assert abs(errors["loss"]) < KEPT, errors
    assert max(abs(error) for error in errors.values()) < PART, errors
    for backward in (False, True):
        parts = [part for part in real if part.endswith("backward") == backward]
        peaks = [max(levels.get(part, 0) for part in parts) for levels in (found, real)]
        assert peaks[0] == pytest.approx(peaks[1], rel=PEAK), errors


@pytest.mark.parametrize("place", range(len(FAMILIES)), ids=list(FAMILIES))
def test_every_family(place: int):
    """Each family in one of the combinations, all of which are seen by some family."""
    family = list(FAMILIES)[place]
    assert_right(FAMILIES[family], **fitted(family, COMBINATIONS[place % len(COMBINATIONS)]))


def test_every_combination_is_seen():
    assert len(FAMILIES) >= len(COMBINATIONS)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_every_combination(family: str):
    for combination in COMBINATIONS:
        assert_right(FAMILIES[family], **fitted(family, combination))


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 1},
        {"loss_head": "chunked", "loss_chunk": 64},
        {"loss_head": "chunked", "loss_chunk": 50, "lora": LORA, "activation_checkpointing": "every_2"},
        {"output": "bf16"},
        {"lora": Lora(rank=5, dropout=0.1, targets=("q_proj", "down_proj"), modules_to_save=("lm_head",))},
    ],
    ids=["one row", "chunks", "chunks beside adapters", "logits in low precision", "dropout, a whole head"],
)
def test_what_else_changes_a_step(changes: dict[str, Any]):
    assert_right(FAMILIES["llama"], **changes)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "adapters"])
def test_compiled_blocks_keep_less(lora: Lora | None):
    """What inductor saves: inputs of norms, of matrix products and of attention; of pointwise chains nothing else."""
    config = FAMILIES["llama"]
    model = build(config, plan(), lora)
    for block in find_blocks(model).modules:
        block.compile()
    real = measure(model, ROWS, LENGTH, VOCAB)
    computed = computation(workload(config, lora), Runtime(compiled=True), "cpu")
    kept = computed.block(plan(), 0, checkpointing="none").kept
    assert kept == pytest.approx(real["block 2"] - real["block 1"], rel=KEPT)
    assert (
        kept < 0.8 * computation(workload(config, lora), SHARDWISE, "cpu").block(plan(), 0, checkpointing="none").kept
    )


@pytest.mark.parametrize("family", ["llama", "gpt2, dropout", "mistral, window"])
def test_evaluation(family: str):
    chosen, config = plan(), FAMILIES[family]
    real = measure_evaluation(build(config, chosen, None), ROWS, LENGTH, VOCAB)
    computed = computation(workload(config), SHARDWISE, "cpu")
    ends = computed.ends(chosen)
    block = computed.block(chosen, 0, checkpointing="none")
    assert real["block 2"] == pytest.approx(ends.in_evaluation + ends.carried + block.evaluation.total, rel=PEAK)
    assert real["head"] == pytest.approx(ends.shared + ends.head.evaluation.total, rel=PEAK)


def test_units_of_a_published_model():
    """Kept per block of Llama-3-8B's shape with fused norms: 20.5 hidden states, and fp32 numbers per query and row."""
    config = tiny(
        "llama",
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=14336,
    )
    chosen, tokens = plan(micro_batch=1), 2048
    work = workload(config, length=tokens)
    fused = computation(work, Runtime(fused_norms=True), "cuda").block(chosen, 0, checkpointing="none")
    plain = computation(work, SHARDWISE, "cuda").block(chosen, 0, checkpointing="none")
    unit = tokens * 4096 * 2
    assert fused.kept == round(20.5 * unit) + tokens * 32 * 4 + 2 * tokens * 4
    assert plain.kept == pytest.approx(24.5 * unit, rel=0.002)


def test_a_first_block_of_a_frozen_model_keeps_less():
    computed = computation(workload(FAMILIES["llama"], LORA), SHARDWISE, "cuda")
    first = computed.block(plan(), 0, checkpointing="none", first=True)
    other = computed.block(plan(), 0, checkpointing="none")
    assert first.kept < other.kept
    assert first.input_gradient == 0 < other.input_gradient


def test_full_checkpointing_keeps_the_input():
    block = computation(workload(FAMILIES["llama"]), SHARDWISE, "cuda").block(plan(), 0, checkpointing="full")
    assert block.kept == block.output == ROWS * LENGTH * 96 * 2
    assert block.keeps_input
    assert block.backward.recomputed > 15 * block.kept


def test_every_second_matrix_product():
    """torchtitan's: of seven products the first, third, fifth and seventh, and attention with its statistics."""
    computed = computation(workload(FAMILIES["llama"]), SHARDWISE, "cuda")
    block = computed.block(plan(), 0, checkpointing="every_second_matmul")
    unit, tokens = ROWS * LENGTH * 96 * 2, ROWS * LENGTH
    value, up = tokens * 32 * 2, tokens * 200 * 2
    assert block.kept == unit + (unit + value + up + unit) + unit + tokens * 6 * 4


def test_offloaded_activations_travel():
    """What selective checkpointing keeps is not autograd's, and stays."""
    computed = computation(workload(FAMILIES["llama"]), SHARDWISE, "cuda")
    away = plan(offload=Offload(activations=True))
    for mode in ("none", "full"):
        there = computed.block(away, 0, checkpointing=mode)
        assert (there.kept, there.travelling) == (0, computed.block(plan(), 0, checkpointing=mode).kept)
    selective = computed.block(away, 0, checkpointing="selective")
    assert selective.travelling == selective.output
    on_host = computation(workload(FAMILIES["llama"]), SHARDWISE, "cpu").block(away, 0, checkpointing="none")
    assert on_host.travelling == 0


def test_many_pieces_of_a_loss_are_as_few():
    """On a GPU four pieces stand for all; on a CPU all are looked at, and each keeps a generator's state."""
    work, chosen = workload(FAMILIES["llama"]), plan(loss_head="chunked", loss_chunk=16)
    on_gpu = computation(work, SHARDWISE, "cuda").ends(chosen).head
    on_cpu = computation(work, SHARDWISE, "cpu").ends(chosen).head
    count = -(-ROWS * (LENGTH - 1) // 16)
    assert on_cpu.kept - on_gpu.kept == count * 5056
    assert on_gpu.backward.total <= on_cpu.backward.total <= on_gpu.backward.total + count * 5056


def test_results_are_remembered():
    work, chosen = workload(FAMILIES["llama"]), plan()
    computed = computation(work, SHARDWISE, "cuda")
    assert computation(work, SHARDWISE, "cuda") is computed
    assert computed.block(chosen, 0, checkpointing="full") is computed.block(plan(), 0, checkpointing="full")
    assert computed.block(chosen, 0, checkpointing="full") is not computed.block(chosen, 0, checkpointing="none")
    assert computed.ends(chosen) is computed.ends(plan())


def test_needs_no_torch():
    program = "import sys, shardwise.predict.blocks; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_an_unknown_family_is_refused():
    work = workload(FAMILIES["llama"])
    other = work.model_copy(update={"model": work.model.model_copy(update={"model_type": "lama"})})
    with pytest.raises(BadInput) as caught:
        computation(other, SHARDWISE, "cuda")
    (problem,) = caught.value.problems
    assert problem.value == "lama"
    assert "did you mean 'llama'?" in problem.fix
    assert "--by trace" in problem.fix
