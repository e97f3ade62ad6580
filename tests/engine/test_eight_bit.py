"""torchao's 8-bit AdamW over sharded parameters: what equals one process, and what its checkpoints hold."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from engine.training import full, make_job, make_plan
from harness.ranks import run_ranks
from shardwise.engine import eight_bit
from shardwise.engine.optimizer import build_optimizer, set_learning_rate
from shardwise.engine.resting_state import local, resting_places

RATE = 1e-3
STEPS = 5
SHAPES = {
    "aligned": (256, 64),  # both shards are whole blocks and start at one
    "small_shards": (96, 64),  # 6144 elements, 3072 a rank: whole on ranks, 8 bits in one process
    "vocab": (101, 128),  # no whole number of blocks, but for rank 1: 6400 elements
    "shifted": (203, 64),  # rank 1's 101 rows end and start inside blocks; 12992 elements are none
    "scale": (64,),
}


@pytest.fixture(scope="module")
def plan(tiny):
    return make_plan(make_job(tiny("llama", layers=1), optimizer="adamw_8bit"), 1)


def _gradients(step):
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _model():
    generator = torch.Generator().manual_seed(99)
    return nn.ParameterDict({name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()})


def _step(model, optimizer, step):
    for name, gradient in _gradients(step).items():
        parameter = model[name]
        gradient = gradient.to(parameter.dtype)
        if hasattr(parameter, "device_mesh"):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient
    set_learning_rate(optimizer, RATE / (1 + step))
    optimizer.step()


def _trained(plan, model, steps=STEPS):
    """Steps by torchao's own code, uncompiled: compiling it for CPU takes longer than the test."""
    torch.compiler.set_stance("force_eager")
    optimizer = build_optimizer(model, plan, learning_rate=RATE, weight_decay=0.1)
    for step in range(steps):
        _step(model, optimizer, step)
    return optimizer


def _sharded(world, dtype=torch.float32):
    model = nn.ParameterDict({name: value.to(dtype) for name, value in _model().items()})
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return model


def test_ranks_against_one_process(plan):
    def body(rank, world):
        model = _sharded(world) if world > 1 else _model()
        optimizer = _trained(plan, model)
        kept = {n: hasattr(local(optimizer.state[p]["exp_avg"]), "codes") for n, p in model.items()}
        return {name: full(parameter) for name, parameter in model.items()}, kept

    ranks, alone = run_ranks(body, 2), run_ranks(body, 1)[0]
    kept = {name: (ranks[0][1][name], ranks[1][1][name], alone[1][name]) for name in SHAPES}
    assert kept == {
        "aligned": (True, True, True),
        "small_shards": (False, False, True),
        "vocab": (False, True, False),
        "shifted": (False, False, False),
        "scale": (False, False, False),
    }, "(rank 0, rank 1, one process) keep 8 bits"
    for name in SHAPES:
        one, two = ranks[0][0][name], alone[0][name]
        torch.testing.assert_close(ranks[1][0][name], one, rtol=0, atol=0)
        if len(set(kept[name])) == 1:
            assert torch.equal(one, two), f"{name}: same blocks, same bits"
        else:
            assert not torch.equal(one, two), f"{name}: one of them is quantised"
            # An update is about as large as the rate. Seen after 5: at most 0.12 of a rate apart, 0.006 on average.
            torch.testing.assert_close(one, two, rtol=0, atol=RATE / 4)
            assert (one - two).abs().mean() < RATE / 50


def test_bytes_are_counted(plan):
    def body(rank, world):
        model = nn.ParameterDict({"weight": torch.randn(256, 64)})
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        torch.compiler.set_stance("force_eager")
        optimizer = build_optimizer(model, plan, learning_rate=RATE, weight_decay=0.1)
        model["weight"].grad = torch.ones_like(model["weight"])
        optimizer.step()
        return resting_places(optimizer)

    places = run_ranks(body, 2)[0]
    cpu = torch.device("cpu")
    elements = 128 * 64
    held = {(torch.uint8, cpu): elements, (torch.float32, cpu): 4 * elements // 256 + 4 * 256}
    assert places == {"step": {(torch.float32, cpu): 4}, "exp_avg": held, "exp_avg_sq": held}


def test_saved_form_gives_the_codes_back(plan):
    """The same sharding: bit for bit, blocks with a negative extreme included."""

    def body(rank, world):
        optimizer = _trained(plan, _sharded(world))
        checked = 0
        for parameter, state in optimizer.state.items():
            saved = eight_bit.saved_form(parameter, state)
            assert all(value.dtype == torch.float32 for value in saved.values())
            again = eight_bit.live_form(parameter, saved)
            assert again.keys() == state.keys()
            for key in ("exp_avg", "exp_avg_sq"):
                here, there = local(state[key]), local(again[key])
                if not hasattr(here, "codes"):
                    assert torch.equal(here, there)
                    continue
                checked += 1
                assert torch.equal(here.codes, there.codes)
                assert torch.equal(here.scale, there.scale)
                if key == "exp_avg":
                    fresh = eight_bit.live_form(parameter, {key: saved[key]})
                    assert not torch.equal(local(fresh[key]).scale, here.scale), "values alone would not do"
        return checked

    assert run_ranks(body, 2) == [2, 4]


def test_scales_of_another_sharding_are_not_used(plan):
    """They would give other values: the values are quantised anew."""

    def body(rank, world):
        optimizer = _trained(plan, model := _sharded(world))
        parameter = model["aligned"]
        saved = eight_bit.saved_form(parameter, optimizer.state[parameter])
        local(saved["exp_avg_scale"]).mul_(0.7)
        wrong = local(eight_bit.live_form(parameter, saved)["exp_avg"])
        fresh = local(eight_bit.live_form(parameter, {"exp_avg": saved["exp_avg"]})["exp_avg"])
        assert torch.equal(wrong.codes, fresh.codes)
        assert torch.equal(wrong.scale, fresh.scale)
        off = (wrong.dequantize() - local(saved["exp_avg"])).abs().view(-1, 256).amax(-1)
        assert (off <= 0.01 * fresh.scale).all()

    run_ranks(body, 2)


def test_bf16_weights_are_refused_because_torchao_fails_on_them(plan):
    def body(rank, world):
        with pytest.raises(RuntimeError, match=r"expected dtype torch\.bfloat16"):
            _trained(plan, _sharded(world, torch.bfloat16))

    run_ranks(body, 2)


@pytest.mark.slow
def test_compiled_as_torchao_runs_it(plan):
    """torchao compiles its update; the uncompiled one of the other tests differs by rounding only."""

    def body(rank, world, stance):
        torch.compiler.set_stance(stance)
        model = nn.ParameterDict({"weight": torch.linspace(-1, 1, 256 * 64).view(256, 64)})
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        optimizer = build_optimizer(model, plan, learning_rate=RATE, weight_decay=0.1)
        for step in range(3):
            whole = torch.randn(256, 64, generator=torch.Generator().manual_seed(step))
            weight = model["weight"]
            weight.grad = distribute_tensor(whole, weight.device_mesh, weight.placements)
            optimizer.step()
        return full(model["weight"])

    compiled = run_ranks(body, 2, "default", timeout=300)[0]
    eager = run_ranks(body, 2, "force_eager")[0]
    torch.testing.assert_close(compiled, eager, rtol=0, atol=RATE / 10)
