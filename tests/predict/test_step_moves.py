"""Copies and updates of a step, in bytes; and what torch's optimizers really read and write."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from predict.block_cases import plan
from predict.work_truth import Watch
from shardwise.predict import step_moves
from shardwise.predict.step_moves import Moves
from shardwise.predict.terms.unit_bytes import UnitBytes
from shardwise.predict.terms.update import BUCKET_ELEMENTS
from shardwise.predict.unit_kind import UnitTensor
from shardwise.spec.layout import Mesh, Offload
from shardwise.spec.plan import Dtypes, Plan
from shardwise.spec.strict import Dtype

RANKS = 4
UNIT = (UnitTensor("weight", (8, 6), True, "fp32", 12), UnitTensor("norm", (6,), True, "fp32", 2))
"""48 and 6 elements; the second is padded to 8 for four ranks, of which rank 0 has 2."""


def chosen(*, reduce: Dtype = "fp32", **changes: Any) -> Plan:
    """Return a plan of four ranks that computes in bf16."""
    made = plan(mesh=Mesh(shard=RANKS), strategy="FULL_SHARD", **changes)
    return made.model_copy(update={"dtypes": made.dtypes.model_copy(update={"reduce": reduce})})


def in_storage(stored: str, state: str, **changes: Any) -> Plan:
    """Return a plan with another dtype at rest."""
    dtypes = Dtypes(
        frozen_storage=None,
        trained_storage=stored,
        optimizer_state=state,
        param="bf16",
        reduce="fp32",
        output="fp32",
        buffer=None,
        loss_scaling=False,
    )
    return plan(**changes).model_copy(update={"dtypes": dtypes})


def test_copy_in_casts_and_copies():
    """14 elements of this rank: read in fp32, written in bf16, then read and written once more."""
    sharded = chosen()
    assert step_moves.copy_in(UnitBytes.of(UNIT, sharded), sharded) == Moves(14 * (4 + 2 + 2 + 2), 2)


def test_copy_in_of_what_is_stored_as_it_is_computed():
    sharded = chosen()
    stored = [tensor._replace(dtype="bf16") for tensor in UNIT]
    assert step_moves.copy_in(UnitBytes.of(stored, sharded), sharded) == Moves(14 * (2 + 2), 1)


def test_a_part_that_is_kept_for_a_smaller_group():
    """56 elements are gathered in bf16; one of two ranks copies 28 of them, and later into its buffer, by way of the
    copy that casts shards of another dtype, unless shards lie on the host."""
    sharded, away = chosen(), chosen(offload=Offload(parameters=True))
    size = UnitBytes.of(UNIT, sharded)
    assert step_moves.keep(size, 2) == Moves(28 * (2 + 2), 1)
    assert step_moves.recopy_in(size, sharded, 2) == Moves(28 * (2 + 2 + 2 + 2), 2)
    assert step_moves.recopy_in(size, away, 2) == Moves(28 * (2 + 2), 1)


def test_buckets_launch_for_their_own_elements():
    """States in another dtype are updated bucket by bucket: three buckets, no more launches than of three updates of a
    third each."""
    other, elements = in_storage("bf16", "fp32", optimizer_implementation="foreach"), 3 * BUCKET_ELEMENTS
    whole, third = step_moves.update(elements, 300, other), step_moves.update(BUCKET_ELEMENTS, 100, other)
    assert whole == Moves(3 * third.moved, 3 * third.operations)


def test_over_one_rank_nothing_is_gathered():
    """54 elements are cast; copying the whole weights is `copy_out`."""
    alone = plan()
    whole = [UNIT[0]._replace(rank_elements=48), UNIT[1]._replace(rank_elements=6)]
    size = UnitBytes.of(whole, alone)
    assert step_moves.copy_in(size, alone) == Moves(54 * (4 + 2), 1)
    assert step_moves.copy_out(size, alone) == Moves(54 * (2 + 2), 1)


def test_copy_out_is_of_padded_weights():
    sharded = chosen()
    assert step_moves.copy_out(UnitBytes.of(UNIT, sharded), sharded) == Moves(56 * (2 + 2), 1)


def test_reductions_take_gradients_in_and_shards_out():
    """54 elements in bf16 become 56 in fp32, of which 14 come back: shards are in fp32 already."""
    sharded = chosen()
    size = UnitBytes.of(UNIT, sharded)
    assert step_moves.reduce_copy_in(size, sharded) == Moves(54 * 2 + 56 * 4, 1)
    assert step_moves.reduce_copy_out(size, sharded) == Moves(0, 0)
    low = chosen(reduce="bf16")
    assert step_moves.reduce_copy_out(UnitBytes.of(UNIT, low), low) == Moves(14 * (2 + 4), 1)


def test_gradients_that_waited_are_in_the_dtype_of_the_reduction():
    waited = chosen(accumulation_steps=2, accumulation_mode="defer_all")
    assert step_moves.reduce_copy_in(UnitBytes.of(UNIT, waited), waited) == Moves(54 * 4 + 56 * 4, 1)


def test_fp16_is_divided_before_it_is_summed():
    half = chosen(reduce="fp16")
    assert step_moves.reduce_copy_in(UnitBytes.of(UNIT, half), half) == Moves(54 * 2 + 56 * 2 + 2 * 56 * 2, 2)


def test_what_is_frozen_is_not_reduced():
    sharded = chosen()
    frozen = UnitBytes.of([tensor._replace(trained=False) for tensor in UNIT], sharded)
    assert step_moves.reduce_copy_in(frozen, sharded) == step_moves.reduce_copy_out(frozen, sharded) == Moves(0, 0)


@pytest.mark.parametrize(
    ("optimizer", "kind", "passes", "operations"),
    [
        ("adamw", "fused", 7, 1),
        ("adamw", "foreach", 20, 8),
        ("adamw", "for_loop", 20, 8 * 3),
        ("sgd", "foreach", 11, 4),
        ("sgd", "for_loop", 11, 4 * 3),
    ],
)
def test_updates_in_fp32(optimizer: str, kind: str, passes: int, operations: int):
    """Fused AdamW: 7 x 4 = 28 bytes an element; else one operation after the other. Three tensors are one launch."""
    updated = plan(optimizer=optimizer, optimizer_implementation=kind)
    assert step_moves.update(1000, 3, updated) == Moves(1000 * passes * 4, operations)


@pytest.mark.parametrize(("optimizer", "kind"), [("adamw", "for_loop"), ("sgd", "for_loop")])
def test_updates_are_those_of_torch(optimizer: str, kind: str):
    """Every operation of torch's loop over parameters, its inputs and outputs; gradients squared are read once."""
    weights = [torch.nn.Parameter(torch.randn(1000)) for _ in range(3)]
    classes = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    more = {"momentum": 0.9, "weight_decay": 0.1} if optimizer == "sgd" else {}
    worker = classes[optimizer](weights, foreach=False, **more)
    for weight in weights:
        weight.grad = torch.randn(1000)
    worker.step()
    with Watch() as seen:
        worker.step()
    found = seen.seen["embedding"]
    made = step_moves.update(3000, 3, plan(optimizer=optimizer, optimizer_implementation=kind))
    twice = 3 * 1000 * 4 if optimizer == "adamw" else 0
    counters = 3 if optimizer == "adamw" else 0
    assert made.operations == found.operations - counters
    assert made.moved == pytest.approx(found.moved - twice, rel=0.01)


def test_states_that_rest_elsewhere_travel_twice():
    """fp32 states on the host: read and written on their way, to and fro, beside the 28 bytes of the update."""
    away = plan(optimizer_implementation="fused", offload=Offload(optimizer=True))
    assert step_moves.update(1000, 3, away) == Moves(1000 * (28 + 2 * 2 * (4 + 4)), 1 + 4 * 3)
    assert step_moves.state_bytes(1000, away) == 8000


def test_weights_in_bf16_are_updated_in_fp32_copies():
    """States rest in fp32; weights and gradients (2 to 4 bytes) are copied, and weights rounded back."""
    low = in_storage("bf16", "fp32", optimizer_implementation="fused")
    assert step_moves.update(1000, 3, low) == Moves(1000 * (28 + 3 * (2 + 4)), 1 + 3 * 3)


def test_all_in_bf16_moves_half():
    low = in_storage("bf16", "bf16", optimizer_implementation="fused")
    assert step_moves.update(1000, 3, low).moved == 14_000


def test_eight_bit_states():
    """Codes and a scale per 256, both states, read and written; both as fp32 in between; weights twice, gradients."""
    eight = plan(optimizer="adamw_8bit")
    assert step_moves.state_bytes(2560, eight) == 2 * (2560 + 40)
    assert step_moves.update(2560, 3, eight) == Moves(2560 * (3 * 4 + 4 * 4) + 4 * (2560 + 40), 9)


def test_clipping_reads_gradients_and_scales_them():
    """The norm of each of 3 tensors, and one launch that scales them all; a launch takes 21 M elements."""
    assert step_moves.clip(1000, 3, plan()) == Moves(12_000, 3 + 1)
    assert step_moves.clip(50_000_000, 3, plan()).operations == 3 + 3
