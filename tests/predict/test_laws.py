"""What holds for every plan: which switches change the bytes, and how."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shardwise.predict.collectives import collectives_of_step
from shardwise.spec.collectives import Collectives
from shardwise.spec.plan import Dtypes, Mesh, Plan, Prefetch, ReduceScatter
from shardwise.spec.units import UnitRow, UnitTable

REDUCE = ("reduce_scatter", "all_to_all")

sizes = st.integers(1, 4)
elements = st.integers(0, 1000)
modes = st.sampled_from(["reduce_each", "defer_all", "defer_replicate"])


@st.composite
def plans(draw: Any) -> Plan:
    return Plan(
        strategy="FULL_SHARD",
        mesh=Mesh(replicate=draw(sizes), shard=draw(sizes)),
        reshard_after_forward=True,
        prefetch=Prefetch(forward=draw(st.integers(0, 3)), backward=draw(st.integers(0, 3)), async_all_gather=True),
        reduce_scatter=ReduceScatter(buffers=1, separate_group=False, asynchronous=False),
        dtypes=Dtypes(frozen_storage=None, param="bf16", reduce="fp32", output="fp32", buffer=None, loss_scaling=False),
        activation_checkpointing="none",
        attention="sdpa",
        micro_batch=1,
        accumulation_steps=draw(st.integers(1, 5)),
        accumulation_mode=draw(modes),
    )


@st.composite
def tables(draw: Any, shard: int) -> UnitTable:
    """Tables whose buffers divide by the shard axis, as padded ones do."""
    rows = []
    for index in range(draw(st.integers(1, 4))):
        whole, trained = draw(elements) * shard, draw(elements) * shard
        rows.append(
            UnitRow(
                name=f"layers.{index}",
                kind="Block",
                parameters=whole + trained,
                trainable=trained,
                gathered_bytes=2 * (whole + trained),
                stored_bytes=4 * (whole + trained),
                stored_by_dtype={"float32": 4 * (whole + trained)},
                all_gather_bytes=2 * (whole + trained),
                reduce_scatter_bytes=4 * trained,
                reshard_after_forward=draw(st.sampled_from([True, False])),
                checkpointed=draw(st.booleans()),
                has_backward=draw(st.booleans()),
            )
        )
    return UnitTable(rows=tuple(rows))


@st.composite
def cases(draw: Any) -> tuple[Plan, UnitTable]:
    plan = draw(plans())
    return plan, draw(tables(plan.mesh.shard))


def step(plan: Plan, units: UnitTable, **changes: object) -> Collectives:
    return collectives_of_step(plan.model_copy(update=changes), units, device_type="cuda")


def bytes_of(collectives: Collectives, kind: str, axis: str) -> int:
    return collectives.total(kind, axis).bytes  # type: ignore[arg-type]


@given(case=cases(), steps=st.integers(1, 9))
def test_deferred_reductions_do_not_grow_with_micro_batches(case, steps):
    plan, units = case
    once = step(plan, units, accumulation_mode="defer_all", accumulation_steps=1)
    many = step(plan, units, accumulation_mode="defer_all", accumulation_steps=steps)
    for kind, axis in (("reduce_scatter", "shard"), ("all_reduce", "replicate")):
        assert bytes_of(once, kind, axis) == bytes_of(many, kind, axis)
    assert bytes_of(many, "all_gather", "shard") == steps * bytes_of(once, "all_gather", "shard")


@given(case=cases(), steps=st.integers(1, 9))
def test_what_is_reduced_each_time_grows_with_micro_batches(case, steps):
    plan, units = case
    once = step(plan, units, accumulation_steps=1)
    each = step(plan, units, accumulation_mode="reduce_each", accumulation_steps=steps)
    inside = step(plan, units, accumulation_mode="defer_replicate", accumulation_steps=steps)
    scattered = steps * bytes_of(once, "reduce_scatter", "shard")
    assert bytes_of(each, "reduce_scatter", "shard") == bytes_of(inside, "reduce_scatter", "shard") == scattered
    if 1 < plan.mesh.replicate < plan.mesh.world:
        summed = bytes_of(once, "all_reduce", "replicate")
        assert bytes_of(each, "all_reduce", "replicate") == steps * summed
        assert bytes_of(inside, "all_reduce", "replicate") == summed


@given(case=cases())
def test_of_one_micro_batch_every_mode_is_the_same(case):
    plan, units = case
    modes = ("reduce_each", "defer_all", "defer_replicate")
    assert len({step(plan, units, accumulation_steps=1, accumulation_mode=mode) for mode in modes}) == 1


@given(case=cases(), forward=st.integers(0, 5), backward=st.integers(0, 5))
def test_prefetch_moves_gathers_and_adds_none(case, forward, backward):
    plan, units = case
    depths = Prefetch(forward=forward, backward=backward, async_all_gather=False)
    assert step(plan, units) == step(plan, units, prefetch=depths)


@given(case=cases())
def test_keeping_weights_gathers_less_and_reduces_the_same(case):
    plan, units = case
    kept = UnitTable(rows=tuple(row.model_copy(update={"reshard_after_forward": False}) for row in units.rows))
    freed = UnitTable(rows=tuple(row.model_copy(update={"reshard_after_forward": True}) for row in units.rows))
    with_kept, with_freed = step(plan, kept), step(plan, freed)
    once = bytes_of(with_kept, "all_gather", "shard")
    assert once <= bytes_of(with_freed, "all_gather", "shard") <= 2 * once
    assert {line.counted.kind for line in with_kept.differences(with_freed)} <= {"all_gather"}


@given(case=cases())
def test_a_processor_exchanges_what_a_gpu_scatters(case):
    plan, units = case
    on_cpu = collectives_of_step(plan, units, device_type="cpu")
    on_gpu = collectives_of_step(plan, units, device_type="cuda")
    assert on_cpu.total("reduce_scatter", "shard").count == on_gpu.total("all_to_all", "shard").count == 0
    assert bytes_of(on_cpu, "all_to_all", "shard") == bytes_of(on_gpu, "reduce_scatter", "shard")
