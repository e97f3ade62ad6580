import pytest

from predict.traced import A10, CPUS, LATENT, MIXTURE, at_full_depth, dtypes, plan, workload
from shardwise.measure.storages import Key, Segment, peaks
from shardwise.predict.depth import Depths, DepthsDiffer, Run, depths_of, extend, runs_of
from shardwise.predict.trace import trace
from shardwise.spec.layout import Mesh, Offload, Prefetch, ReduceScatter
from shardwise.spec.method import Lora


@pytest.mark.parametrize(
    ("kinds", "runs"),
    [
        ("aaaaa", [(0, 1, 5)]),
        ("ababab", [(0, 2, 3)]),
        ("dddmmmmm", [(0, 1, 3), (3, 1, 5)]),
        ("sssfsssfss", [(0, 4, 2), (8, 1, 2)]),
        ("abcabd", [(0, 1, 1), (1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 1, 1), (5, 1, 1)]),
        ("", []),
    ],
)
def test_blocks_are_divided_into_runs_of_a_repeated_pattern(kinds, runs):
    assert [(run.start, run.period, run.repeats) for run in runs_of(list(kinds))] == runs


def test_every_second_block_makes_a_pattern_of_two():
    depths = depths_of([0] * 30, plan(activation_checkpointing="every_2"))
    assert depths.runs == (Run(start=0, period=2, repeats=15),)
    assert depths.blocks() == (0, 1, 2, 3)
    assert depths.blocks(0) == (0, 1, 2, 3, 4, 5)


def test_what_is_gathered_ahead_keeps_more_blocks_apart():
    shallow = depths_of([0] * 30, plan())
    deep = depths_of([0] * 30, plan(prefetch=Prefetch(forward=3, backward=2, async_all_gather=True)))
    assert (len(shallow.blocks()), len(deep.blocks())) == (3, 6)


def test_a_shallow_model_is_not_cut():
    depths = depths_of([0] * 3, plan())
    assert depths.cut == ()
    assert [[place.real for place in depths.places(number)] for number in range(3)] == [[0], [1], [2]]


def test_blocks_in_the_middle_stand_for_both_ends_of_their_run():
    depths = Depths(
        runs=(Run(start=0, period=1, repeats=2), Run(start=2, period=1, repeats=50)), kept=(2, 3), first=1, last=1
    )
    assert depths.blocks() == (0, 1, 2, 3, 4)
    assert [[place.real for place in depths.places(number)] for number in range(5)] == [[0], [1], [2], [3, 50], [51]]
    assert depths.places(3)[0].in_longer == {1: 3}
    assert depths.places(3)[1].in_longer == {1: 4}


def _segment(where: str, live: int) -> Segment:
    state = {"activations": live}
    return Segment(
        key=Key(step=1, phase="forward", micro_batch=0, where=where), visit=0, start=state, peak=state, end=state
    )


def test_the_highest_place_moves_with_the_depth():
    depths = Depths(runs=(Run(start=0, period=1, repeats=10),), kept=(3,), first=1, last=1)

    def trace_of(blocks):
        return [*(_segment(f"h.{number}", 5 + 2 * number) for number in range(blocks)), _segment("loss", 12)]

    found = extend(depths, trace_of(3), {0: trace_of(4)}, "h")
    assert {s.key.where: s.peak["activations"] for s in found} == {"h.0": 5, "h.1": 7, "h.8": 21, "h.9": 23, "loss": 12}
    assert peaks(found)[0].where == "h.9"


def test_traces_that_do_not_compare_are_not_extended():
    depths = Depths(runs=(Run(start=0, period=1, repeats=10),), kept=(3,), first=1, last=1)
    base = [_segment("h.0", 1), _segment("loss", 1)]
    with pytest.raises(DepthsDiffer, match="loss"):
        extend(depths, base, {0: [_segment("h.0", 1)]}, "h")


FROZEN = dtypes(frozen_storage="bf16")
SLOW = pytest.mark.slow
CASES = {
    "full": (workload(layers=6), plan(), A10),
    "LoRA": (
        workload(layers=5, lora=Lora(rank=3, targets=("q_proj", "down_proj"))),
        plan(dtypes=FROZEN, activation_checkpointing="none"),
        A10,
    ),
}
MORE = {
    "every second": (workload(layers=7), plan(activation_checkpointing="every_2"), A10),
    "two kinds": (
        workload("gemma2", layers=7, seq_len=40, config={"sliding_window": 32}),
        plan(attention="eager", activation_checkpointing="none"),
        A10,
    ),
    "to two ranks": (workload(layers=6), plan(reshard_after_forward=2), A10),
    "kept": (workload(layers=6), plan(strategy="SHARD_GRAD_OP", reshard_after_forward=False), A10),
    "mixture": (workload("qwen3_moe", layers=6, config=MIXTURE), plan(), A10),
    "full on CPUs": (workload(layers=9), plan(), CPUS),
    "latent": (workload("deepseek_v3", layers=9, config=LATENT), plan(), A10),
    "gathered ahead": (
        workload(layers=9),
        plan(prefetch=Prefetch(forward=2, backward=3, async_all_gather=True)),
        CPUS,
    ),
    "reductions in flight": (
        workload(layers=9),
        plan(reduce_scatter=ReduceScatter(buffers=3, separate_group=False, asynchronous=True)),
        A10,
    ),
    "tensor": (workload(layers=9), plan(mesh=Mesh(shard=4, tensor=2, sequence_parallel=True)), A10),
    "deferred": (workload(layers=9), plan(accumulation_steps=3, accumulation_mode="defer_all"), CPUS),
    "activations on the host": (
        workload(layers=9),
        plan(offload=Offload(activations=True), activation_checkpointing="none"),
        A10,
    ),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=SLOW) for name in MORE)])
def test_a_few_blocks_say_what_all_blocks_take(name):
    work, how, cluster = {**CASES, **MORE}[name]
    report = trace(work, how, cluster)
    assert "brought to the real depth" in report.notes[0]
    whole = {instant.phase: instant for instant in peaks(at_full_depth(work, how, cluster).segments)}
    assert {instant.phase for instant in report.footprint.peaks} == set(whole)
    for instant in report.footprint.peaks:
        real = whole[instant.phase]
        assert instant.where == real.where
        assert instant.allocated == pytest.approx(real.allocated, rel=1e-3)
        for category in {*instant.live, *real.live}:
            assert instant.live.get(category, 0) == pytest.approx(real.live.get(category, 0), abs=1e-3 * real.allocated)


def test_buckets_of_an_optimizer_that_rests_elsewhere_fill_up_with_depth(monkeypatch):
    from shardwise.engine import resting_state

    monkeypatch.setattr(resting_state, "BUCKET_ELEMENTS", 30_000)
    work, how = workload(layers=5), plan(offload=Offload(optimizer=True))
    said = trace(work, how, A10).footprint.of_phase("optimizer_step")
    whole = {instant.phase: instant for instant in peaks(at_full_depth(work, how, A10).segments)}
    assert said.allocated == pytest.approx(whole["optimizer_step"].allocated, rel=1e-3)
