"""Checkpoints of every optimizer: the resumed run is the uninterrupted one, and other ranks can load it."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from engine.training import make_job, make_plan
from harness.ranks import run_ranks
from shardwise.engine import eight_bit
from shardwise.engine.optimizer import build_optimizer, set_learning_rate
from shardwise.engine.resting_state import RestingOptimizer, local, resting_places
from shardwise.spec.problems import BadInput
from shardwise.state.checkpoint import TrainingProgress, latest, load, save

from .sharded import assert_same, build, full, step

CPU = torch.device("cpu")
KINDS = {
    "adamw fused": {"optimizer_implementation": "fused"},
    "host": {"offload": {"optimizer": True}},
    "host fused bf16": {
        "offload": {"optimizer": True},
        "optimizer_state_dtype": "bf16",
        "optimizer_implementation": "fused",
    },
    "bf16": {"optimizer_state_dtype": "bf16"},
    "fp32 of bf16 weights": {"mixed_precision": {"storage_dtype": "bf16"}, "optimizer_state_dtype": "fp32"},
    "bf16 of bf16 weights": {"mixed_precision": {"storage_dtype": "bf16"}},
    "sgd": {"optimizer": "sgd", "optimizer_implementation": "for_loop"},
    "sgd fused": {"optimizer": "sgd", "optimizer_implementation": "fused"},
    "sgd bf16": {"optimizer": "sgd", "optimizer_state_dtype": "bf16"},
}


def _optimizer(model, plan, momentum=0.9):
    return build_optimizer(model, plan, learning_rate=1e-2, weight_decay=0.1, momentum=momentum)


def _save(folder, model, optimizer, at):
    return save(
        folder,
        model=model,
        optimizer=optimizer,
        progress=TrainingProgress(step=at, samples_seen=at),
        extra={},
        keep=1,
    )


def _everything(model, optimizer):
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = full(parameter)
        state = optimizer.state.get(parameter, {})
        if type(optimizer).__name__ == eight_bit.CLASS:
            state = eight_bit.saved_form(parameter, state)
        found |= {f"{name}/{key}": full(value) for key, value in state.items()}
    return found


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        *((kind, False) for kind in KINDS),
        *((kind, True) for kind in ("host fused bf16", "fp32 of bf16 weights", "sgd fused")),
    ],
)
def test_resumed_run_is_bitwise_the_uninterrupted_one(tiny, tmp_path, kind, lora):
    source = tiny("llama", layers=1)
    plan = make_plan(make_job(source, **KINDS[kind]), 2)
    dtype = torch.bfloat16 if plan.dtypes.trained_storage == "bf16" else torch.float32

    def fresh():
        model = build(source, lora=lora, dtype=dtype)
        if dtype == torch.bfloat16:
            model.to(dtype)  # PEFT makes adapters in fp32
        return model, _optimizer(model, plan)

    def body(rank, world):
        model, optimizer = fresh()
        for index in range(3):
            step(model, optimizer, index, rank, world)
        _save(tmp_path, model, optimizer, 3)
        places = resting_places(optimizer)
        losses = [step(model, optimizer, index, rank, world) for index in range(3, 6)]
        expected = _everything(model, optimizer)

        model, optimizer = fresh()
        loaded = load(latest(tmp_path), model=model, optimizer=optimizer)
        assert loaded.notes == ()
        assert resting_places(optimizer) == places
        assert [step(model, optimizer, index, rank, world) for index in range(3, 6)] == losses
        assert_same(_everything(model, optimizer), expected)

    run_ranks(body, 2)
    described = json.loads((latest(tmp_path) / "checkpoint.json").read_text())["contents"]["optimizer"]
    assert described["name"] == ("SGD" if "sgd" in kind else "AdamW"), "the optimizer, not where its states rest"
    stored = {info["dtype"] for state in described["state"].values() for key, info in state.items() if key != "step"}
    assert stored == {"bfloat16" if plan.dtypes.optimizer_state == "bf16" else "float32"}


def test_momentum_zero_has_nothing_to_save(tiny, tmp_path):
    source = tiny("llama", layers=1)
    plan = make_plan(make_job(source, optimizer="sgd"), 2)

    def body(rank, world):
        model = build(source)
        optimizer = _optimizer(model, plan, momentum=0.0)
        step(model, optimizer, 0, rank, world)
        _save(tmp_path, model, optimizer, 1)
        before = _everything(model, optimizer)
        load(latest(tmp_path), model=model, optimizer=_optimizer(model, plan, momentum=0.0))
        assert_same(_everything(model, optimizer), before)
        other = _optimizer(model, make_plan(make_job(source, optimizer_state_dtype="bf16"), 2))
        with pytest.raises(BadInput, match="optimizer: SGD in the checkpoint, AdamW here"):
            load(latest(tmp_path), model=model, optimizer=other)

    run_ranks(body, 2)


@pytest.mark.parametrize(
    ("saved", "loaded", "worlds"),
    [
        ("host", "bf16", (2, 1)),
        ("host fused bf16", "adamw fused", (1, 2)),
        ("bf16", "host", (2, 2)),
    ],
)
def test_other_ranks_dtypes_and_places(tiny, tmp_path, saved, loaded, worlds):
    """States come in the dtype and at the place of the optimizer that loads them."""
    source = tiny("llama", layers=1)

    def write(rank, world):
        model = build(source)
        optimizer = _optimizer(model, make_plan(make_job(source, **KINDS[saved]), world))
        step(model, optimizer, 0, rank, world)
        _save(tmp_path, model, optimizer, 1)
        return _everything(model, optimizer)

    def read(rank, world):
        model = build(source)
        plan = make_plan(make_job(source, **KINDS[loaded]), world)
        optimizer = _optimizer(model, plan)
        load(latest(tmp_path), model=model, optimizer=optimizer)
        assert isinstance(optimizer, RestingOptimizer) is (loaded != "adamw fused")
        dtype = torch.bfloat16 if plan.dtypes.optimizer_state == "bf16" else torch.float32
        assert set(resting_places(optimizer)["exp_avg"]) == {(dtype, CPU)}
        found = _everything(model, optimizer)
        step(model, optimizer, 1, rank, world)
        return found

    before, after = run_ranks(write, worlds[0])[0], run_ranks(read, worlds[1])[0]
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value.to(after[name].dtype)), name


def test_loading_makes_no_states_elsewhere(tiny, tmp_path):
    """They are read straight into where they rest: pinned host memory, where there is a device."""
    source = tiny("llama", layers=1)
    plan = make_plan(make_job(source, **KINDS["host fused bf16"]), 2)

    def body(rank, world):
        model = build(source)
        optimizer = _optimizer(model, plan)
        step(model, optimizer, 0, rank, world)
        _save(tmp_path, model, optimizer, 1)
        fresh = _optimizer(model, plan)
        asked, empty_state = [], fresh.empty_state

        def recorded(parameter, dtype):
            asked.append(dtype)
            return empty_state(parameter, dtype)

        fresh.empty_state = recorded
        load(latest(tmp_path), model=model, optimizer=fresh)
        count = 2 * len(list(model.parameters()))
        assert asked == [torch.bfloat16] * (2 * count), "to read into, and to rest in"

    run_ranks(body, 2)


class _Blocks(nn.Module):
    """Weights of which two ranks keep all, some and no states in 8 bits, as one process does of others."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        shapes = {"aligned": (256, 64), "small_shards": (96, 64), "vocab": (101, 128), "scale": (64,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))


def _eight_bit_run(world, plan):
    torch.compiler.set_stance("force_eager")
    model = _Blocks()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return model, _optimizer(model, plan)


def _eight_bit_step(model, optimizer, index):
    generator = torch.Generator().manual_seed(index)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
    set_learning_rate(optimizer, 1e-2 / (1 + index))
    optimizer.step()


def test_eight_bit_states_resume_bitwise(tiny, tmp_path):
    plan = make_plan(make_job(tiny("llama", layers=1), optimizer="adamw_8bit"), 2)

    def body(rank, world):
        model, optimizer = _eight_bit_run(world, plan)
        for index in range(3):
            _eight_bit_step(model, optimizer, index)
        _save(tmp_path, model, optimizer, 3)
        places = resting_places(optimizer)
        for index in range(3, 6):
            _eight_bit_step(model, optimizer, index)
        expected = _everything(model, optimizer)

        model, optimizer = _eight_bit_run(world, plan)
        load(latest(tmp_path), model=model, optimizer=optimizer)
        assert resting_places(optimizer) == places
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(1e-2 / 3)
        for index in range(3, 6):
            _eight_bit_step(model, optimizer, index)
        assert_same(_everything(model, optimizer), expected)
        load(latest(tmp_path), model=model, optimizer=optimizer)
        assert {int(state["step"]) for state in optimizer.state.values()} == {3}, "over a later state, too"

    run_ranks(body, 2)


@pytest.mark.parametrize("worlds", [(2, 1), (1, 2), (2, 4)])
def test_eight_bit_states_on_other_ranks(tiny, tmp_path, worlds):
    """Weights are equal; states are quantised anew in other blocks, and equal where they are kept whole."""
    plan = make_plan(make_job(tiny("llama", layers=1), optimizer="adamw_8bit"), 2)

    def write(rank, world):
        model, optimizer = _eight_bit_run(world, plan)
        for index in range(3):
            _eight_bit_step(model, optimizer, index)
        _save(tmp_path, model, optimizer, 3)
        return _everything(model, optimizer)

    def read(rank, world):
        model, optimizer = _eight_bit_run(world, plan)
        load(latest(tmp_path), model=model, optimizer=optimizer)
        found = _everything(model, optimizer)
        whole = {n: not hasattr(local(optimizer.state[p]["exp_avg"]), "codes") for n, p in model.named_parameters()}
        _eight_bit_step(model, optimizer, 3)
        return found, whole

    before, ranks = run_ranks(write, worlds[0])[0], run_ranks(read, worlds[1])
    after = ranks[0][0]
    for name in ("aligned", "small_shards", "vocab", "scale"):
        assert torch.equal(after[name], before[name])
        for key in ("exp_avg", "exp_avg_sq"):
            here, there = after[f"{name}/{key}"], before[f"{name}/{key}"]
            if all(whole[name] for _, whole in ranks):
                assert torch.equal(here, there), name
            # half the widest gap between two codes, which is 1.4% of a block's largest value
            torch.testing.assert_close(here, there, rtol=0, atol=0.008 * float(there.abs().max()))
