"""States at rest and at work, and parameters on different meshes, on tensors made by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from engine.training import full, make_job, make_plan
from harness.ranks import run_ranks
from shardwise.engine.optimizer import build_optimizer
from shardwise.engine.resting_state import RestingOptimizer

MOMENTUM = 0.9
RATE = 1e-2


def test_second_moments_in_bf16_never_fall():
    """Documented: a step takes 0.1% off, and bf16 cannot say less than 0.2%."""
    left = {}
    for dtype in (torch.float32, torch.bfloat16):
        weight = nn.Parameter(torch.zeros(1))
        optimizer = RestingOptimizer(torch.optim.AdamW([weight], lr=RATE), dtype=dtype)
        for step in range(200):
            weight.grad = torch.full((1,), 1.0 if step < 100 else 0.1)
            optimizer.step()
            if step in (99, 199):
                left.setdefault(dtype, []).append(optimizer.state[weight]["exp_avg_sq"].item())
    before, after = left[torch.float32]
    assert after < 0.92 * before
    before, after = left[torch.bfloat16]
    assert after == before


@pytest.mark.parametrize("limit", [1, 5000, 10**9])
def test_no_more_than_a_bucket_is_at_work(limit):
    weights = [nn.Parameter(torch.randn(size)) for size in (3000, 10, 1500, 2000, 700)]
    worker = torch.optim.AdamW(weights, lr=RATE, foreach=True)
    optimizer = RestingOptimizer(worker, dtype=torch.bfloat16, bucket_elements=limit)
    sizes, step = [], worker.step

    def measured():
        step()
        moments = [v for state in worker.state.values() for k, v in state.items() if k != "step"]
        assert all(moment.dtype == torch.float32 for moment in moments)
        sizes.append(sum(moment.numel() for moment in moments) // 2)

    worker.step = measured
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        weights[1].grad = None
        optimizer.step()
    assert sum(sizes) == 2 * 7200, "every weight with a gradient, once a step"
    assert max(sizes) <= max(limit, 3000)
    assert len(sizes) == 2 * {1: 4, 5000: 2, 10**9: 1}[limit]
    assert weights[1] not in optimizer.state
    assert not worker.state, "nothing stays at work between steps"


class _MixedMeshes(nn.Module):
    """As tensor parallelism leaves a block: linears on two axes, norms on one."""

    def __init__(self, world, tensor, tensors):
        super().__init__()
        mesh = init_device_mesh("cpu", (world // tensor, tensor), mesh_dim_names=("shard", "tensor"))
        self.meshes = {
            "column": (mesh, [Shard(0), Shard(0)]),
            "row": (mesh, [Shard(0), Shard(1)]),
            "copied": (mesh, [Shard(0), Replicate()]),
            "scale": (mesh["shard"], [Shard(0)]),
        }
        for name, value in tensors.items():
            self.register_parameter(name, nn.Parameter(self.sharded(name, value)))

    def sharded(self, name, value):
        mesh, placements = self.meshes[name]
        return distribute_tensor(value.clone(), mesh, placements)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adamw on the host"])
def test_parameters_on_different_meshes(tiny, optimizer):
    """Every implementation, on two ranks as shard 2 x tensor 1 and as shard 1 x tensor 2."""
    kind, host = optimizer.split()[0], "host" in optimizer
    job = make_job(tiny("llama", layers=1), optimizer=kind, offload={"optimizer": host})
    plans = [
        make_plan(job.model_copy(update={"optimizer_implementation": word}), 2)
        for word in ("fused", "foreach", "for_loop")
    ]
    shapes = {"column": (101, 64), "row": (63, 96), "copied": (3, 64), "scale": (64,)}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    gradients = [{n: torch.randn(s, generator=generator) for n, s in shapes.items()} for _ in range(3)]

    def train(model, plan, shared):
        trained = build_optimizer(model, plan, learning_rate=RATE, weight_decay=0.1, momentum=MOMENTUM)
        for step in gradients:
            for name, parameter in model.named_parameters():
                parameter.grad = shared(name, step[name])
            trained.step()
        return {name: full(parameter) for name, parameter in model.named_parameters()}

    def body(rank, world):
        models = [_MixedMeshes(world, tensor, tensors) for tensor in (1, 2) for _ in plans]
        return [train(model, plan, model.sharded) for model, plan in zip(models, 2 * plans, strict=True)]

    live = run_ranks(body, 2)[0]
    for plan, one, two in zip(plans, live[:3], live[3:], strict=True):
        whole = nn.ParameterDict({name: value.clone() for name, value in tensors.items()})
        alone = train(whole, plan, lambda name, gradient: gradient.clone())
        assert all(torch.equal(one[name], alone[name]) for name in shapes)
        assert all(torch.equal(two[name], alone[name]) for name in shapes)


def test_a_gradient_on_another_placement_is_an_error(tiny):
    plan = make_plan(make_job(tiny("llama", layers=1), offload={"optimizer": True}), 2)

    def body(rank, world):
        model = _MixedMeshes(world, 1, {"copied": torch.zeros(4, 8)})
        model.copied.grad = model.sharded("copied", torch.zeros(4, 8)).redistribute(placements=[Replicate()] * 2)
        optimizer = build_optimizer(model, plan, learning_rate=RATE, weight_decay=0.1)
        with pytest.raises(ValueError, match="not sharded as its parameter"):
            optimizer.step()

    run_ranks(body, 2)


def test_state_dict_round_trip_keeps_every_bit():
    """fp32 moments of bf16 weights must not pass through bf16."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(64, generator=generator).bfloat16()) for _ in range(3)]

    def make():
        worker = torch.optim.AdamW([{"params": weights[:1]}, {"params": weights[1:], "weight_decay": 0.0}], lr=RATE)
        return RestingOptimizer(worker, dtype=torch.float32)

    optimizer = make()
    for weight in weights:
        weight.grad = torch.randn(64, generator=generator).bfloat16()
    optimizer.step()
    other = make()
    other.load_state_dict(optimizer.state_dict())
    for weight in weights:
        assert other.state[weight].keys() == optimizer.state[weight].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(other.state[weight][key], value) for key, value in optimizer.state[weight].items())
        assert other.state[weight]["exp_avg"].dtype == torch.float32
        assert not torch.equal(other.state[weight]["exp_avg"], other.state[weight]["exp_avg"].bfloat16().float())


def test_a_closure_is_evaluated_once_with_gradients():
    weight = nn.Parameter(torch.ones(3))
    optimizer = RestingOptimizer(torch.optim.SGD([weight], lr=1.0), dtype=torch.bfloat16)

    def closure():
        loss = (weight**2).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 3.0
    assert weight.tolist() == [-1.0, -1.0, -1.0]
