"""The rule of thumb, and batch arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.planning import facts, job
from shardwise.planner.decide import decide
from shardwise.spec.problems import BadInput


@pytest.mark.parametrize(
    ("parameters", "world", "strategy", "mesh"),
    [
        (7_000_000_000, 8, "SHARD_GRAD_OP", (1, 8)),
        (12_999_999_999, 8, "SHARD_GRAD_OP", (1, 8)),
        (13_000_000_000, 8, "FULL_SHARD", (1, 8)),
        (70_000_000_000, 64, "FULL_SHARD", (1, 64)),
        (70_000_000_000, 1, "NO_SHARD", (1, 1)),
    ],
)
def test_auto_follows_the_rule_of_thumb_and_says_so(parameters, world, strategy, mesh):
    plan = decide(job(), facts(parameters=parameters, world=world))
    assert (plan.strategy, (plan.mesh.replicate, plan.mesh.shard)) == (strategy, mesh)
    assert plan.reasons["strategy"].startswith("auto: ")
    assert world == 1 or "rule of thumb" in plan.reasons["strategy"]


@pytest.mark.parametrize(
    ("strategy", "mesh", "reshard"),
    [("FULL_SHARD", (1, 8), True), ("SHARD_GRAD_OP", (1, 8), False), ("NO_SHARD", (8, 1), True)],
)
def test_a_named_strategy_is_obeyed(strategy, mesh, reshard):
    plan = decide(job(fsdp={"strategy": strategy}), facts(parameters=70_000_000_000))
    assert plan.strategy == strategy
    assert (plan.mesh.replicate, plan.mesh.shard) == mesh
    assert plan.reshard_after_forward is reshard
    assert "strategy" not in plan.reasons


def test_fp16_scales_the_loss_and_keeps_the_reduction_in_fp32():
    plan = decide(job(mixed_precision={"param_dtype": "fp16"}), facts())
    assert plan.dtypes.loss_scaling
    assert (plan.dtypes.param, plan.dtypes.reduce, plan.dtypes.output) == ("fp16", "fp32", "fp32")
    assert not decide(job(mixed_precision={"param_dtype": "bf16"}), facts()).dtypes.loss_scaling


@given(world=st.integers(1, 64), micro=st.none() | st.integers(1, 12), batch=st.none() | st.integers(1, 800))
def test_the_global_batch_is_kept_or_refused(world, micro, batch):
    wanted = job(micro_batch=micro, global_batch=batch, fsdp={"strategy": "FULL_SHARD"})
    if batch is not None and batch % (world * (micro or 1)):
        with pytest.raises(BadInput, match="use "):
            decide(wanted, facts(world=world))
        return
    plan = decide(wanted, facts(world=world))
    assert plan.micro_batch == (micro or 1)
    assert plan.global_batch == plan.micro_batch * plan.accumulation_steps * world
    assert batch is None or plan.global_batch == batch


def test_sizes_that_would_do_are_named():
    words = r"global_batch: 30: is not a multiple of 8 data ranks x micro_batch 2 = 16; use 16 or 32"
    with pytest.raises(BadInput, match=words):
        decide(job(global_batch=30, micro_batch=2), facts())


def test_the_fingerprint_follows_decisions_not_reasons():
    named = decide(job(fsdp={"strategy": "SHARD_GRAD_OP"}), facts())
    auto = decide(job(), facts())
    assert named.fingerprint() == auto.fingerprint()
    other = decide(job(activation_checkpointing="full"), facts())
    assert other.fingerprint() != auto.fingerprint()
