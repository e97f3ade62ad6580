"""A live model that is not what the plan says is refused, whatever the difference."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.training import make_expected, make_job, make_plan
from harness.ranks import run_ranks
from shardwise.engine.apply import units
from shardwise.engine.blocks import find_blocks
from shardwise.engine.compat import ReduceScatterComm, gather_in_background, unit_facts
from shardwise.engine.load import load_model
from shardwise.engine.mesh import build_mesh
from shardwise.engine.readback import PlanNotHonoured, check_live_model
from shardwise.engine.source import open_source


def _untouched(model):
    pass


def _late_layer(model):
    find_blocks(model).modules[0].added = nn.Linear(4, 4)


def _other_dtype(model):
    parameter = next(p for p in model.parameters() if p.requires_grad)
    parameter.data = parameter.data.bfloat16()


def _averaged(model):
    units(model)[1].set_force_sum_reduction_for_comms(False)


def _kept_gathered(model):
    units(model)[1].set_reshard_after_forward(False)


def _other_attention(model):
    model.config._attn_implementation = "eager"


def _cast_rotary(model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.bfloat16()


def _nothing_ahead(model):
    units(model)[1].set_modules_to_forward_prefetch([])


def _default_backward_order(model):
    units(model)[2].set_modules_to_backward_prefetch([])


def _blocking_gathers(model):
    gather_in_background(model, False)


def _other_reduce_scatter(model):
    class Other(ReduceScatterComm):
        allocate = __call__ = None
        __abstractmethods__ = frozenset()

    units(model)[1].set_custom_reduce_scatter(Other())


def _more_in_flight(model):
    unit_facts(units(model)[1]).reduce_scatter.queue.buffers = 7


def _unsynchronised(model):
    model.set_requires_gradient_sync(False)


def _unsynchronised_replicas(model):
    model.set_requires_all_reduce(False)


def _unwrapped_block(model):
    blocks = find_blocks(model).modules
    blocks[1].checkpoint_fn.keywords["context_fn"] = None


def _compiled_block(model):
    find_blocks(model).modules[0].compile()


CHANGES = {
    _nothing_ahead: "unit model.layers.0: forward prefetch is [], planned ['model.layers.1', 'model.layers.2']",
    _default_backward_order: "unit model.layers.1: backward prefetch is [], planned ['model.layers.0']",
    _blocking_gathers: "background gathers is False, planned True",
    _other_reduce_scatter: "reduce-scatter is Other, planned ExchangedReduce",
    _more_in_flight: "reductions in flight is 7, planned 2",
    _unsynchronised: "reduces gradients is (False, False), planned (True, True)",
    _unsynchronised_replicas: "reduces gradients is (True, False), planned (True, True)",
    _unwrapped_block: "block 1: checkpointing is full, planned selective",
    _compiled_block: "block 0: compiled is True, planned False",
    _untouched: None,
    _late_layer: "added.weight: not sharded",
    _other_dtype: "stored in torch.bfloat16, planned torch.float32",
    _averaged: "gradients summed is False",
    _kept_gathered: "reshard_after_forward is False, planned True",
    _other_attention: "attention is eager, planned sdpa",
    _cast_rotary: "rotary table",
}


def _check(rank, world, job, change):
    plan = make_plan(job, world)
    mesh, expected = build_mesh(plan.mesh, "cpu"), make_expected(job, plan)
    model = load_model(job, plan, open_source(job.model), mesh)
    change(model)
    try:
        check_live_model(model, plan, mesh, expected)
    except PlanNotHonoured as error:
        return str(error)
    return None


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_every_difference_is_named(tiny, change):
    job = make_job(
        tiny("llama"),
        fsdp={"strategy": "FULL_SHARD"},
        micro_batch=3,
        activation_checkpointing="selective",
        mixed_precision={"param_dtype": "fp32", "buffer_dtype": "fp32"},
    )
    found = run_ranks(_check, 2, job, change)[0]
    if CHANGES[change] is None:
        assert found is None
    else:
        assert CHANGES[change] in found


def _against_other_plan(rank, world, job, update):
    plan = make_plan(job, world)
    mesh = build_mesh(plan.mesh, "cpu")
    model = load_model(job, plan, open_source(job.model), mesh)
    other = plan.model_copy(update=update)
    with pytest.raises(PlanNotHonoured) as caught:
        check_live_model(model, other, mesh, make_expected(job, other))
    return len(caught.value.differences)


@pytest.mark.parametrize(
    ("update", "differences"),
    [
        ({"reshard_after_forward": False}, 3),
        ({"activation_checkpointing": "every_2"}, 2),
        ({"attention": "eager"}, 1),
    ],
)
def test_a_plan_that_was_not_applied_is_refused(tiny, update, differences):
    job = make_job(tiny("llama"), fsdp={"strategy": "FULL_SHARD"}, micro_batch=3)
    assert run_ranks(_against_other_plan, 2, job, update) == [differences, differences]


def test_policies_of_every_unit_are_compared(tiny):
    job = make_job(tiny("llama"), fsdp={"strategy": "FULL_SHARD"}, micro_batch=3)
    dtypes = make_plan(job, 2).dtypes.model_copy(update={"param": "bf16", "output": "bf16"})
    # four units gather in another dtype, and the root puts out another one
    assert run_ranks(_against_other_plan, 2, job, {"dtypes": dtypes}) == [5, 5]
    assert torch.float32 == torch.get_default_dtype()
