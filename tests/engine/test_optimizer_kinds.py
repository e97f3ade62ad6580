"""Every optimizer over sharded parameters equals PyTorch's own over whole ones, fed with the same gradients."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from engine.training import batches_of, full, make_job, make_plan, train_alone, train_on_rank
from harness.ranks import run_ranks
from shardwise.engine import resting_state
from shardwise.engine.load import load_model
from shardwise.engine.mesh import build_mesh
from shardwise.engine.optimizer import build_optimizer
from shardwise.engine.resting_state import resting_places
from shardwise.engine.scaler import build_scaler
from shardwise.engine.source import open_source
from shardwise.train.step import training_step

IMPLEMENTATIONS = ("fused", "foreach", "for_loop")
MOMENTUM = 0.9
RATE = 1e-2
CPU = torch.device("cpu")


@dataclass
class Live:
    """What a sharded run did, whole."""

    start: list[torch.Tensor]
    """Trained weights before the first step."""
    gradients: list[list[torch.Tensor]]
    """Clipped gradients of every step."""
    weights: list[torch.Tensor]
    """Trained weights at the end."""
    states: list[dict[str, torch.Tensor]]
    """States at the end, as they rest."""
    places: dict
    """What `resting_places` reads."""
    hooks: int
    """How often the hook after a step ran."""
    kind: str
    """Class of the optimizer."""


def _job(tiny, family="llama", **fields):
    given = {"fsdp": {"strategy": "FULL_SHARD"}, "learning_rate": RATE, "weight_decay": 0.1, "max_grad_norm": 0.5}
    return make_job(tiny(family, layers=1), **given | fields)


def _train(rank, world, job, steps, bucket_elements=None):
    if bucket_elements is not None:
        resting_state.BUCKET_ELEMENTS = bucket_elements
    source, plan = open_source(job.model), make_plan(job, world)
    model = load_model(job, plan, source, build_mesh(plan.mesh, "cpu"))
    momentum = MOMENTUM if job.optimizer == "sgd" else 0.0
    optimizer = build_optimizer(model, plan, learning_rate=RATE, weight_decay=job.weight_decay, momentum=momentum)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    live = Live([full(p) for p in trained], [], [], [], {}, 0, type(optimizer).__name__)
    optimizer.register_step_pre_hook(lambda *_: live.gradients.append([full(p.grad) for p in trained]))

    def count(*_):
        live.hooks += 1

    optimizer.register_step_post_hook(count)
    batches, position = batches_of(job, plan, rank, world), 0
    for _ in range(steps):
        training_step(
            model,
            batches.micro_batches(position),
            plan=plan,
            optimizer=optimizer,
            scaler=build_scaler(plan, "cpu"),
            max_grad_norm=job.max_grad_norm,
            device=CPU,
        )
        position = batches.next_position(position)
    live.weights = [full(p) for p in trained]
    live.states = [{key: full(value) for key, value in optimizer.state[p].items()} for p in trained]
    live.places = resting_places(optimizer)
    return live


def _alone(job, live, *, work=torch.float32, rest=torch.float32):
    """The same updates by PyTorch's optimizer on whole tensors; states are rounded to `rest` after each."""
    weights = [w.clone() for w in live.start]
    optimizer, at_work = None, []
    for gradients in live.gradients:
        if optimizer is None:
            at_work = [nn.Parameter(w.to(work)) for w in weights]
            groups = [
                {"params": [p for p in at_work if p.ndim >= 2], "weight_decay": 0.1},
                {"params": [p for p in at_work if p.ndim < 2], "weight_decay": 0.0},
            ]
            options = {name: job.optimizer_implementation == name for name in ("fused", "foreach")}
            groups = [group for group in groups if group["params"]]
            if job.optimizer == "sgd":
                optimizer = torch.optim.SGD(groups, lr=RATE, momentum=MOMENTUM, **options)
            else:
                optimizer = torch.optim.AdamW(groups, lr=RATE, **options)
        for p, w, gradient in zip(at_work, weights, gradients, strict=True):
            p.data.copy_(w)
            p.grad = gradient.to(work)
        optimizer.step()
        for p, w in zip(at_work, weights, strict=True):
            w.copy_(p.detach())
            for key, value in optimizer.state[p].items():
                if key != "step":
                    value.copy_(value.to(rest))
    states = [{k: v if k == "step" else v.to(rest) for k, v in optimizer.state[p].items()} for p in at_work]
    return weights, states


def _assert_equal(live, weights, states):
    assert len(live.weights) == len(weights) > 0
    assert all(torch.equal(a, b) for a, b in zip(live.weights, weights, strict=True))
    moved = [not torch.equal(a, b) for a, b in zip(live.weights, live.start, strict=True)]
    assert all(moved) or (any(moved) and live.weights[0].dtype == torch.bfloat16), "bf16 loses small updates"
    for here, there in zip(live.states, states, strict=True):
        assert here.keys() == there.keys()
        assert here
        for key in here:
            assert here[key].dtype == there[key].dtype
            assert torch.equal(here[key], there[key]), key


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_sharded_equals_torch_on_whole_tensors(tiny, optimizer, implementation, lora):
    job = _job(tiny, "qwen2", optimizer=optimizer, optimizer_implementation=implementation, use_lora=lora)
    first, second = run_ranks(_train, 2, job, 3)
    assert len(first.gradients) == first.hooks == 3
    _assert_equal(first, *_alone(job, first))
    assert all(torch.equal(a, b) for a, b in zip(first.weights, second.weights, strict=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_whole_run_equals_one_process(tiny, implementation):
    """With everything around it too: loading, clipping, accumulation."""
    job = _job(tiny, optimizer_implementation=implementation, micro_batch=1, offload={"optimizer": True})
    live = run_ranks(train_on_rank, 2, job)[0]
    plain = job.model_copy(update={"offload": type(job.offload)()})
    alone = train_alone(plain, 2, 3, live.norms)
    assert live.losses == pytest.approx(alone.losses, rel=1e-6)
    assert all(torch.equal(live.weights[name], alone.weights[name]) for name in alone.weights)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("bucket", [None, 1000])
def test_states_on_the_host_change_nothing(tiny, optimizer, bucket):
    """Same dtype, another place: bitwise, however states are cut into buckets."""
    job = _job(tiny, optimizer=optimizer, offload={"optimizer": True}, optimizer_implementation="foreach")
    live = run_ranks(_train, 2, job, 5, bucket)[0]
    assert live.kind == "RestingOptimizer"
    assert live.hooks == 5, "once per step, whatever the number of buckets"
    _assert_equal(live, *_alone(job, live))


@pytest.mark.parametrize(
    ("optimizer", "implementation", "storage", "state"),
    [
        *(("adamw", implementation, "fp32", "bf16") for implementation in IMPLEMENTATIONS),
        *(("adamw", implementation, "bf16", "fp32") for implementation in IMPLEMENTATIONS),
        ("adamw", "foreach", "bf16", "bf16"),
        ("sgd", "fused", "fp32", "bf16"),
        ("sgd", "foreach", "bf16", "fp32"),
    ],
)
def test_states_rest_in_their_dtype(tiny, optimizer, implementation, storage, state):
    job = _job(
        tiny,
        optimizer=optimizer,
        optimizer_implementation=implementation,
        optimizer_state_dtype=state,
        mixed_precision={"storage_dtype": storage},
    )
    live = run_ranks(_train, 2, job, 4, 3000)[0]
    rest = getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[state])
    work = torch.bfloat16 if storage == state == "bf16" else torch.float32
    _assert_equal(live, *_alone(job, live, work=work, rest=rest))
    shaped = live.places.keys() - {"step"}
    assert shaped == ({"exp_avg", "exp_avg_sq"} if optimizer == "adamw" else {"momentum_buffer"})
    assert all(set(live.places[key]) == {(rest, CPU)} for key in shaped)


def test_bf16_states_follow_the_formula(tiny):
    """AdamW written out: moments come up to fp32, are updated, and are rounded."""
    job = _job(tiny, optimizer_implementation="for_loop", optimizer_state_dtype="bf16")
    live = run_ranks(_train, 2, job, 5)[0]
    for index, start in enumerate(live.start):
        weight, mean, square = start.clone(), torch.zeros_like(start).bfloat16(), torch.zeros_like(start).bfloat16()
        for step, gradients in enumerate(live.gradients, start=1):
            gradient = gradients[index]
            if weight.ndim >= 2:
                weight *= 1 - RATE * 0.1
            high_mean = torch.lerp(mean.float(), gradient, 1 - 0.9)
            high_square = square.float() * 0.999 + (1 - 0.999) * gradient * gradient
            rate = RATE / (1 - 0.9**step)
            weight -= rate * high_mean / (high_square.sqrt() / (1 - 0.999**step) ** 0.5 + 1e-8)
            mean, square = high_mean.bfloat16(), high_square.bfloat16()
        # A sum in another order can round a moment to the other side: 1/256 of an update of at most about RATE.
        torch.testing.assert_close(live.weights[index], weight, rtol=0, atol=5 * RATE / 256)
        torch.testing.assert_close(live.states[index]["exp_avg"], mean, rtol=2**-7, atol=1e-7)


def test_what_rests_is_counted(tiny):
    """Bytes of this rank's shards, from the live tensors."""

    def counted(**fields):
        ranks = run_ranks(_train, 2, _job(tiny, **fields), 1)
        places = [rank.places for rank in ranks]
        assert all(set(one[key]) == set(places[0][key]) for one in places for key in one)
        elements = sum(weight.numel() for weight in ranks[0].weights)
        return {key: sum(sum(one[key].values()) for one in places) / elements for key in places[0] if key != "step"}

    assert counted() == {"exp_avg": 4, "exp_avg_sq": 4}
    assert counted(optimizer_state_dtype="bf16", offload={"optimizer": True}) == {"exp_avg": 2, "exp_avg_sq": 2}
    assert counted(optimizer="sgd") == {"momentum_buffer": 4}


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer_implementation": "fused"},
        {"optimizer_implementation": "fused", "offload": {"optimizer": True}},
        {"optimizer_state_dtype": "bf16"},
        {"optimizer": "sgd", "optimizer_implementation": "fused"},
    ],
    ids=lambda fields: " ".join(map(str, fields.values())),
)
def test_an_fp16_overflow_skips_the_step(tiny, fields):
    job = _job(tiny, mixed_precision={"param_dtype": "fp16"}, micro_batch=3, **fields)

    def body(rank, world):
        source, plan = open_source(job.model), make_plan(job, world)
        model = load_model(job, plan, source, build_mesh(plan.mesh, "cpu"))
        optimizer = build_optimizer(model, plan, learning_rate=RATE, weight_decay=0.0, momentum=MOMENTUM)
        scaler, batches = build_scaler(plan, "cpu"), batches_of(job, plan, rank, world)
        trained = [p for p in model.parameters() if p.requires_grad]
        armed = False

        def poison(parameter):
            if armed and rank == 1:
                parameter.grad.to_local().view(-1)[:1] = float("inf")

        trained[0].register_post_accumulate_grad_hook(poison)
        seen = []
        for step in range(3):
            armed = step == 1
            before = [full(p) for p in trained]
            result = training_step(
                model,
                batches.micro_batches(0),
                plan=plan,
                optimizer=optimizer,
                scaler=scaler,
                max_grad_norm=1.0,
                device=CPU,
            )
            moved = any(not torch.equal(a, full(p)) for a, p in zip(before, trained, strict=True))
            seen.append((result.skipped, moved))
        counts = {int(state["step"]) for state in optimizer.state.values() if "step" in state}
        return seen, counts

    for seen, counts in run_ranks(body, 2):
        assert seen == [(False, True), (True, False), (False, True)]
        assert counts in ({2}, set()), "a skipped step is no update"


def test_shards_are_dtensors_at_rest(tiny):
    """Checkpoints need states sharded as their weights."""
    job = _job(tiny, optimizer_state_dtype="bf16")

    def body(rank, world):
        source, plan = open_source(job.model), make_plan(job, world)
        model = load_model(job, plan, source, build_mesh(plan.mesh, "cpu"))
        optimizer = build_optimizer(model, plan, learning_rate=RATE, weight_decay=0.0)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        for parameter, state in optimizer.state.items():
            assert isinstance(state["exp_avg"], DTensor)
            assert state["exp_avg"].placements == parameter.placements
            assert state["exp_avg"].to_local().shape == parameter.to_local().shape

    run_ranks(body, 2)
