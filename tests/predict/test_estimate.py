"""The estimate by itself: what it needs, how fast it starts, what it refuses, and laws that hold whatever the model."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from predict.estimate_grid import A100, BF16, CHUNKED, FULL, KEEP, LORA, case, hybrid, plan_of, shape
from shardwise.catalogue.clusters import find_cluster
from shardwise.catalogue.models import find_model
from shardwise.predict.estimate import estimate, estimate_peak
from shardwise.spec.footprint import Category
from shardwise.spec.layout import Mesh, Prefetch, ReduceScatter, Units
from shardwise.spec.plan import Plan
from shardwise.spec.problems import BadInput
from shardwise.spec.workload import Workload

PROGRAM = """
import sys
from shardwise.catalogue.clusters import find_cluster
from shardwise.catalogue.models import find_model
from shardwise.predict.estimate import estimate
from shardwise.spec.plan import Plan
from shardwise.spec.workload import Workload

workload = Workload(model=find_model("llama-3.1-8b"), seq_len=4096)
report = estimate(workload, Plan.model_validate_json(sys.argv[1]), find_cluster("8xA100-SXM-80GB"))
assert "torch" not in sys.modules and "transformers" not in sys.modules, "torch was imported"
print(report.footprint.peak.allocated)
"""
STARTS_WITHIN = 1.0
"""Seconds of one core, from a cold start to the figure."""


def _eight_billion(**fields: object) -> tuple[Workload, Plan]:
    workload = Workload(model=find_model("llama-3.1-8b"), seq_len=4096)
    return workload, plan_of(cluster=find_cluster(A100), **{**FULL, **CHUNKED, **fields})


def test_cold_start_without_torch():
    workload, plan = _eight_billion()
    before = time.process_time(), _children()
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, plan.model_dump_json()], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == estimate_peak(workload, plan, find_cluster(A100))
    assert _children() - before[1] < STARTS_WITHIN


def _children() -> float:
    import resource

    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_peak_alone_is_that_of_the_report():
    cluster = find_cluster(A100)
    for one in (
        case("a", "llama", A100),
        case("b", "qwen2", A100, **KEEP, **FULL),
        case("c", "gpt2", A100, seq_len=77),
    ):
        report = estimate(one.workload, one.plan, cluster)
        assert estimate_peak(one.workload, one.plan, cluster) == report.footprint.peak.allocated
        assert report.instrument == "estimate"
        assert [instant.phase for instant in report.footprint.peaks] == [
            "load",
            "forward",
            "backward",
            "optimizer_step",
            "evaluation",
        ]


def test_without_held_out_rows_there_is_no_evaluation():
    one = case("a", "llama", A100)
    training = one.workload.model_copy(update={"held_out": False})
    footprint = estimate(training, one.plan, one.cluster).footprint
    assert footprint.of_phase("evaluation") is None
    assert footprint.peak == estimate(one.workload, one.plan, one.cluster).footprint.of_phase("backward")


@pytest.mark.parametrize(("reduce", "forward", "backward"), [("fp32", 6, 10), ("bf16", 6, 8)])
def test_transient_buffers_are_the_known_multiples_of_a_block(reduce: str, forward: int, backward: int):
    """prediction.md (c): a block of N parameters in bf16 costs 6 N at most in forward, in backward 10 N or 8 N."""
    one = case("a", "llama", A100, dtypes=BF16.model_copy(update={"reduce": reduce}), **FULL, **CHUNKED, seq_len=1)
    footprint = estimate(one.workload, one.plan, one.cluster).footprint
    block = one.workload.model.kinds[0].parameters
    root = 2 * sum(tensor.elements for tensor in one.workload.model.outside)
    deep = one.workload.model.layers - 1
    in_forward = _of(footprint.of_phase("forward"), "unsharded_parameters", "all_gather_buffers")
    assert in_forward == pytest.approx(root + max(forward * block, 2 * block + 2 * block + root), rel=0.01)
    small = case("a", "llama", A100, config={"vocab_size": 64}, dtypes=one.plan.dtypes, **FULL, **CHUNKED, seq_len=1)
    found = estimate(small.workload, small.plan, small.cluster).footprint.of_phase("backward")
    transient = _of(
        found, "unsharded_parameters", "all_gather_buffers", "reduce_scatter_buffers", "unsharded_gradients"
    )
    assert deep > 2
    assert transient == pytest.approx(backward * block, rel=0.01)


def _of(instant: object, *categories: Category) -> int:
    return sum(instant.live.get(category, 0) for category in categories)  # type: ignore[attr-defined]


def test_deferred_gradients_are_whole_and_in_the_dtype_of_the_reduction():
    one = case("a", "llama-mha", A100, accumulation_steps=4, accumulation_mode="defer_all", **FULL, **CHUNKED)
    forward = estimate(one.workload, one.plan, one.cluster).footprint.of_phase("forward")
    assert forward is not None
    assert forward.live["unsharded_gradients"] == 4 * one.workload.model.parameters


def test_states_shrink_with_ranks_and_not_with_replicas():
    one, other = case("a", "llama", "8xH100-SXM-80GB", **FULL), case("b", "llama", "2x8xH100-SXM-80GB", **FULL)
    replicated = case("c", "llama", "2x8xH100-SXM-80GB", **hybrid(2, 8), **FULL)
    on = [estimate(each.workload, each.plan, each.cluster).footprint.peak.live for each in (one, other, replicated)]
    assert on[1]["optimizer_states"] == pytest.approx(on[0]["optimizer_states"] / 2, rel=1e-4)
    assert on[2]["optimizer_states"] == on[0]["optimizer_states"] == 8 * on[0]["sharded_parameters"] // 4


def test_more_of_anything_never_needs_less():
    usual = case("a", "llama", A100, **FULL, **CHUNKED)
    more = [
        case("rows", "llama", A100, **FULL, **CHUNKED, micro_batch=2),
        case("length", "llama", A100, **FULL, **CHUNKED, seq_len=4096),
        case("depth", "llama", A100, config={"num_hidden_layers": 13}, **FULL, **CHUNKED),
        case(
            "buffers",
            "llama",
            A100,
            **FULL,
            **CHUNKED,
            reduce_scatter=ReduceScatter(buffers=3, separate_group=False, asynchronous=True),
        ),
        case(
            "ahead", "llama", A100, **FULL, **CHUNKED, prefetch=Prefetch(forward=2, backward=2, async_all_gather=True)
        ),
        case("kept", "llama", A100, **KEEP, **FULL, **CHUNKED),
        case("whole logits", "llama", A100, **FULL),
        case("no checkpoints", "llama", A100, **CHUNKED),
        case("foreach", "llama", A100, **FULL, **CHUNKED, optimizer_implementation="foreach"),
    ]
    least = estimate_peak(usual.workload, usual.plan, usual.cluster)
    for one in more:
        assert estimate_peak(one.workload, one.plan, one.cluster) >= least, one.name


def test_largest_buffer_is_named():
    one = case("a", "llama", A100, micro_batch=3)
    logits = estimate(one.workload, one.plan, one.cluster).footprint.largest_buffer
    assert (logits.bytes, logits.category, logits.where) == (2 * 3 * 2048 * 128256 * 4, "logits_and_loss", "loss")
    reduced = case("b", "llama", A100, **FULL, **CHUNKED)
    root = estimate(reduced.workload, reduced.plan, reduced.cluster).footprint.largest_buffer
    outside = sum(tensor.elements for tensor in reduced.workload.model.outside)
    assert (root.bytes, root.category, root.where) == (4 * outside, "reduce_scatter_buffers", "root")


def test_kernels_of_the_card_count():
    ampere, hopper = case("a", "llama", A100), case("b", "llama", "8xH100-SXM-80GB")
    loads = [estimate(one.workload, one.plan, one.cluster).footprint.peaks[0] for one in (ampere, hopper)]
    assert loads[1].allocated - loads[0].allocated == 2 * (32 * 2**20 - 8519680)


def test_frozen_base_has_no_gradients():
    one = case("a", "mistral", A100, lora=LORA, **FULL, **CHUNKED)
    step = estimate(one.workload, one.plan, one.cluster).footprint.of_phase("optimizer_step")
    assert step is not None
    adapters = sum(64 * sum(tensor.shape) for tensor in one.workload.model.kinds[0].tensors if len(tensor.shape) == 2)
    assert step.live["sharded_gradients"] == 4 * 6 * adapters // 8


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"units": Units(wrap=("LlamaMLP",))}, "units.wrap", "--by trace"),
        ({"loss_head": "fused", "mesh": Mesh(shard=4, tensor=2)}, "loss_head", "chunked"),
    ],
)
def test_what_no_formula_describes_is_refused(fields: dict[str, object], field: str, says: str):
    one = case("a", "llama", A100, **fields)
    with pytest.raises(BadInput, match=says) as refused:
        estimate(one.workload, one.plan, one.cluster)
    assert [problem.field for problem in refused.value.problems] == [field]


def test_unknown_family_is_sent_to_the_trace():
    model = shape("llama").model_copy(update={"model_type": "unheard-of"})
    with pytest.raises(BadInput, match="--by trace"):
        estimate(Workload(model=model, seq_len=64), plan_of(cluster=find_cluster(A100)), find_cluster(A100))
