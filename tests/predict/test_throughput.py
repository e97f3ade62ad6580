"""Throughput worked out by hand: FLOPs of a step, MFU and HFU, seconds and cost of a million tokens."""

from __future__ import annotations

import pytest

from report.footprints import answer, footprint, model
from report.timelines import MS, RATED, STEP
from shardwise.catalogue.models import find_model
from shardwise.planner.by_shape import plan_by_shape
from shardwise.planner.decide import Facts, decide
from shardwise.predict.step_time import timeline_of
from shardwise.predict.throughput import flops_of_step, peak_flops, throughput_of
from shardwise.report.waits import merged_waits
from shardwise.spec.cluster import Cluster
from shardwise.spec.curve import Curve
from shardwise.spec.job import Job
from shardwise.spec.problems import BadInput
from shardwise.spec.reader import read_job
from shardwise.spec.speeds import DeviceSpeeds, Measured
from shardwise.spec.throughput import Price
from shardwise.spec.workload import Workload

BLOCK_FORWARD = 2 * 32 * 32 + 2 * 4 * (8 + 8) * 64
"""One matrix of 32 x 32; 4 heads of 8 and 8 look at 64 tokens."""
HEAD_FORWARD = 2 * 32 * 101
RATED_CLUSTER = Cluster(name="8xA10", nodes=1, per_node=8, gpu=RATED)


def of(**job):
    """Workload and plan of the made-up model of three blocks, 64 tokens a row, on 8 cards."""
    judged = answer(footprint(), **job)
    return judged.workload, judged.plan


def per_token(**job):
    workload, plan = of(**job)
    flops = flops_of_step(workload, plan)
    tokens = plan.global_batch * 64
    return flops.model / tokens, flops.again / tokens


def test_forward_counts_once_and_backward_twice():
    assert per_token() == (3 * (3 * BLOCK_FORWARD + HEAD_FORWARD), 0)


@pytest.mark.parametrize(
    ("settings", "again"),
    [
        ({"activation_checkpointing": "full"}, 3 * BLOCK_FORWARD),
        ({"activation_checkpointing": "every_2"}, 2 * BLOCK_FORWARD),
        ({"activation_checkpointing": "selective"}, 0),
        ({"loss_head": "chunked"}, HEAD_FORWARD),
        ({"activation_checkpointing": "full", "loss_head": "chunked"}, 3 * BLOCK_FORWARD + HEAD_FORWARD),
    ],
)
def test_what_is_done_again_counts_apart(settings, again):
    """Blocks 0 and 2 are the second ones of every_2."""
    assert per_token(**settings) == (3 * (3 * BLOCK_FORWARD + HEAD_FORWARD), again)


def real(name: str, seq_len: int, **job) -> tuple[float, Workload]:
    """FLOPs per token of a model of the catalogue."""
    wanted = Job.model_validate(
        {"model": {"path": name}, "fsdp": {"strategy": "FULL_SHARD"}, "seq_len": seq_len, **job}
    )
    spec = find_model(name)
    facts = Facts(
        world=8,
        device_type="cuda",
        parameters=spec.parameters,
        frozen_storage="bf16" if job.get("use_lora") else None,
        attention="sdpa",
    )
    plan = decide(wanted, facts)
    workload = Workload(model=spec, seq_len=seq_len, lora=wanted.lora)
    return flops_of_step(workload, plan).model / (plan.global_batch * seq_len), workload


def test_a_real_model_comes_to_six_per_weight_and_attention():
    """Llama-2-7B: 32 blocks of 4 x 4096^2 + 3 x 4096 x 11008, a head of 4096 x 32000, no embedding; 32 heads of 128."""
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    attention = 32 * 2 * 32 * (128 + 128) * 2048
    found, _ = real("llama-2-7b", 2048)
    assert found == 6 * weights + 3 * attention


def test_frozen_weights_have_no_gradient_of_their_own():
    """Adapters of rank 8 on the 7 layers of a block train: 8 x (4 x 8192 + 3 x 15104) elements."""
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    adapters = 32 * 8 * (4 * 8192 + 3 * (4096 + 11008))
    attention = 32 * 2 * 32 * (128 + 128) * 2048
    found, _ = real("llama-2-7b", 2048, use_lora=True, lora_rank=8)
    assert found == 4 * weights + 6 * adapters + 3 * attention


def test_of_experts_only_the_active_ones_count():
    """Mixtral: 2 of 8 experts, a router, grouped attention of 8 key heads of 128."""
    block = 4096 * (4096 + 1024 + 1024 + 4096) + 8 * 4096 + 2 * 3 * 4096 * 14336
    weights = 32 * block + 4096 * 32000
    attention = 32 * 2 * 32 * (128 + 128) * 1024
    found, _ = real("mixtral-8x7b", 1024)
    assert found == 6 * weights + 3 * attention


def test_a_window_bounds_what_a_token_looks_at():
    """Every second block of Gemma 2 looks at 4096 tokens only."""
    short, workload = real("gemma-2-9b", 4096)
    long, _ = real("gemma-2-9b", 8192)
    heads = workload.model.kinds[0].attention
    one = 3 * 2 * heads.heads * (heads.head_dim + heads.value_dim)
    assert long - short == workload.model.layers / 2 * one * 4096


def test_shares_of_the_peak_and_time_and_cost_of_a_million_tokens():
    """64 rows of 64 tokens in 30 ms at the fp32 rate of a made-up card."""
    workload, plan = of(activation_checkpointing="full", global_batch=64)
    found = throughput_of(STEP, workload, plan, RATED_CLUSTER, Price(amount=16.0, per="node"))
    tokens = 64 * 64
    assert found.tokens == tokens
    assert found.tokens_per_s == pytest.approx(tokens / (30 * MS))
    assert found.tokens_per_s_per_gpu == pytest.approx(tokens / (30 * MS) / 8)
    needed = 3 * (3 * BLOCK_FORWARD + HEAD_FORWARD) * tokens
    assert found.mfu == pytest.approx(needed / (30 * MS * 8 * 31.25e12))
    assert found.hfu == pytest.approx((needed + 3 * BLOCK_FORWARD * tokens) / (30 * MS * 8 * 31.25e12))
    assert found.s_per_million == pytest.approx(1e6 / (tokens / (30 * MS)))
    assert found.price_per_gpu_hour == 2.0
    assert found.cost_per_million == pytest.approx(16.0 * found.s_per_million / 3600)


def test_the_peak_is_that_of_the_dtype_of_computation():
    _, plan = of(mixed_precision={"param_dtype": "bf16"})
    assert peak_flops(RATED_CLUSTER, plan) == 125e12


def test_without_rates_there_is_no_share_and_without_a_price_no_cost():
    workload, plan = of()
    found = throughput_of(STEP, workload, plan, answer(footprint()).cluster)
    assert (found.mfu, found.hfu, found.cost_per_million) == (None, None, None)
    assert peak_flops(Cluster(name="2xcpu", nodes=1, per_node=2, gpu=None), plan) is None


def test_on_measured_cpus_the_peak_is_the_best_product():
    """1e9 FLOPs in 20 ms are 50 GFLOP/s, better than 1e6 in 1 ms."""
    _, plan = of()
    products = Curve(points=((1e6, 1e-3), (1e9, 20e-3)), source="here")
    memory = Curve(points=((1e6, 1e-3),), source="here")
    device = DeviceSpeeds(products={"fp32": products}, memory={"fp32": memory}, issue_s=0)
    measured = Measured(device=device, source="here")
    cluster = Cluster(name="2xcpu", nodes=1, per_node=2, gpu=None, measured=measured)
    assert peak_flops(cluster, plan) == pytest.approx(50e9)


@pytest.mark.parametrize(
    ("amount", "per", "field"),
    [
        (0, "gpu", "--price"),
        (-1, "gpu", "--price"),
        (float("nan"), "node", "--price-per-node"),
        (float("inf"), "gpu", "--price"),
    ],
)
def test_what_is_no_price_is_refused(amount, per, field):
    with pytest.raises(BadInput) as caught:
        Price(amount=amount, per=per)
    (problem,) = caught.value.problems
    assert (problem.field, problem.allowed) == (field, "a number above 0, 1e+12 at most")


def test_the_made_up_model_is_as_the_docstrings_say():
    assert (model().hidden, model().vocab, model().layers) == (32, 101, 3)


@pytest.mark.parametrize(
    "settings",
    [
        ("fsdp=FULL_SHARD",),
        ("fsdp=FULL_SHARD", "global_batch=16", "micro_batch=1"),
        ("fsdp=FULL_SHARD", "global_batch=80", "micro_batch=1"),
        ("fsdp=SHARD_GRAD_OP", "global_batch=80", "micro_batch=1", "accumulation=defer_all"),
        ("fsdp=HYBRID_SHARD", "mesh.shard=4", "global_batch=48", "micro_batch=1"),
        ("fsdp=NO_SHARD", "global_batch=32", "micro_batch=1"),
        ("fsdp=FULL_SHARD", "offload=parameters", "global_batch=16", "micro_batch=1"),
    ],
)
def test_the_waits_of_a_predicted_step_account_for_all_time_without_computing(settings):
    """Micro-batches that the timeline leaves out included."""
    common = ("model=smollm2-135m", "seq_len=512", "mixed_precision=bf16", "activation_checkpointing=true")
    job = read_job(None, [*common, *settings], needs_data=False)
    cluster = Cluster(name="2x4xA10", nodes=2, per_node=4, gpu=RATED, network="eth-25")
    found = plan_by_shape(job, find_model("smollm2-135m"), cluster)
    timeline = timeline_of(found.workload, found.plan, cluster)
    waited = sum(one.total_s for one in merged_waits(timeline, found.plan.accumulation_steps))
    assert waited == pytest.approx(timeline.step_s - timeline.busy["compute"], rel=0.02, abs=1e-5)
