"""Real steps of two ranks under the tracker: equal to the allocator, undisturbed, and each byte where it belongs."""

from __future__ import annotations

import itertools

import pytest

from harness.ranks import run_ranks
from measure.live_storages import LENGTH, VOCAB, Seen, compare, make_units, segments_of, wide_job
from shardwise.measure.storages import Segment

CASES = {
    "full": {},
    "lora, recomputed": {"use_lora": True, "activation_checkpointing": "full"},
    "chunked, accumulated": {"loss_head": "chunked", "loss_chunk": 20, "global_batch": 8},
    "replicated, bf16": {"fsdp": {"strategy": "NO_SHARD"}, "mixed_precision": {"param_dtype": "bf16"}},
    "deferred, selective": {
        "global_batch": 8,
        "accumulation": "defer_all",
        "activation_checkpointing": "selective",
        "mixed_precision": {"param_dtype": "bf16"},
    },
    "optimizer offloaded": {"offload": {"optimizer": True}},
    "weights offloaded": {"offload": {"parameters": True}},
    "activations offloaded": {"offload": {"activations": True}},
}


FAMILIES = ("llama", "qwen2", "gemma2")


def _check(seen: Seen) -> None:
    near = abs(seen.tracker_peak - seen.allocator_peak) <= max(0.01 * seen.allocator_peak, 256 * 1024)
    assert near, seen.unseen
    assert seen.watched == seen.unwatched


def test_the_peak_is_the_allocators_and_watching_changes_nothing(tiny):
    jobs = {family: wide_job(tiny, family) for family in FAMILIES}
    for rank in run_ranks(compare, 2, jobs):
        for family in FAMILIES:
            _check(rank[family])


@pytest.fixture(scope="module")
def compared(tiny):
    """Return what both ranks saw of every case."""
    return run_ranks(compare, 2, {case: wide_job(tiny, **fields) for case, fields in CASES.items()}, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(CASES))
def test_the_peak_is_the_allocators_in_every_mode(compared, case):
    for rank in compared:
        _check(rank[case])


FULL = {"fsdp": {"strategy": "FULL_SHARD"}}
BLOCKS = [f"model.layers.{number}" for number in range(3)]
HIDDEN = 2 * LENGTH * 128 * 4
"""Bytes of the hidden states of a micro-batch."""
SCALARS = 4096
"""Bytes of counters, masks, padding and the like."""
RUNS = {
    "kept": FULL,
    "recomputed": {"activation_checkpointing": "full", **FULL},
    "accumulated": {"global_batch": 8, **FULL},
    "deferred": {"global_batch": 8, "accumulation": "defer_all", **FULL},
    "adapters": {"use_lora": True, **FULL},
    "states offloaded": {"offload": {"optimizer": True}, **FULL},
    "weights offloaded": {"offload": {"parameters": True}, **FULL},
}


@pytest.fixture(scope="module")
def runs(tiny):
    """Return the segments of rank 0 in two steps of every run."""
    return run_ranks(segments_of, 2, {name: wide_job(tiny, **fields) for name, fields in RUNS.items()})[0]


def _one(segments: list[Segment], phase: str, where: str, *, micro_batch: int = 0, visit: int = 0) -> Segment:
    """The segment of the second step."""
    (found,) = [
        s
        for s in segments
        if (s.key.step, s.key.phase, s.key.where, s.key.micro_batch, s.visit) == (1, phase, where, micro_batch, visit)
    ]
    return found


def test_units_are_at_work_in_order(runs):
    segments = runs["accumulated"]
    seen = [(s.key.phase, s.key.micro_batch, s.key.where) for s in segments if s.key.step == 1]
    forward = ["root", *BLOCKS, "root", "loss"]
    backward = ["loss", "root", *BLOCKS[::-1], "root"]
    assert seen == [
        ("optimizer_step", 0, "root"),
        *(("forward", 0, where) for where in forward),
        *(("backward", 0, where) for where in backward),
        *(("forward", 1, where) for where in forward),
        *(("backward", 1, where) for where in [*backward, "gradients"]),
        ("optimizer_step", 1, "optimizer"),
    ]
    for before, after in itertools.pairwise(segments):
        assert before.end == after.start


def test_weights_gradients_and_states_are_where_they_belong(tiny, runs):
    table, segments = make_units(wide_job(tiny, **FULL), 2), runs["kept"]
    root, block = table.rows[-1], table.rows[0]
    shards = _one(segments, "optimizer_step", "optimizer")
    for category, size in {
        "sharded_parameters": table.stored_bytes / 2,
        "sharded_gradients": table.stored_bytes / 2,
        "optimizer_states": table.stored_bytes,
    }.items():
        assert shards.end[category] == pytest.approx(size, abs=SCALARS), category
    assert shards.end.get("unsharded_parameters") == shards.end.get("all_gather_buffers") == 0
    first = _one(segments, "forward", BLOCKS[0])
    assert first.end["unsharded_parameters"] == pytest.approx(root.gathered_bytes, abs=SCALARS)
    assert first.peak["unsharded_parameters"] == pytest.approx(root.gathered_bytes + block.gathered_bytes, abs=SCALARS)
    largest = max(s.peak.get("unsharded_gradients", 0) for s in segments if s.key.where in BLOCKS)
    head = VOCAB * 128 * 4
    assert head < largest <= head + block.gathered_bytes + SCALARS


def test_activations_are_kept_or_computed_again(runs):
    kept, again = runs["kept"], runs["recomputed"]
    assert not any(s.peak.get("recomputed_activations") for s in kept)
    per_block = [
        _one(kept, "forward", b).end["activations"] - _one(kept, "forward", b).start["activations"] for b in BLOCKS[1:]
    ]
    assert per_block[0] == per_block[1] > 8 * HIDDEN
    for number, block in enumerate(BLOCKS):
        inputs = _one(again, "forward", block).end["activations"]
        assert inputs == pytest.approx((number + 2) * HIDDEN, abs=LENGTH * 32 * 4 * 4), (
            "inputs of blocks and the output"
        )
        recomputed = _one(again, "backward", block).peak["recomputed_activations"]
        assert 0.5 * per_block[0] < recomputed <= per_block[0]
        assert not _one(again, "backward", block).end["recomputed_activations"]


def test_logits_are_the_losss(runs):
    segments = runs["kept"]
    logits = 2 * LENGTH * VOCAB * 4
    forward, backward = _one(segments, "forward", "loss"), _one(segments, "backward", "loss")
    assert 2 * logits < forward.peak["logits_and_loss"] < 3.1 * logits
    assert backward.end["logits_and_loss"] < SCALARS
    assert not any(s.peak.get("logits_and_loss", 0) > SCALARS for s in segments if s.key.where in BLOCKS)


def test_deferred_gradients_stay_whole(tiny, runs):
    table, segments = make_units(wide_job(tiny, **RUNS["deferred"]), 2), runs["deferred"]
    between = _one(segments, "forward", "root", micro_batch=1)
    assert between.start["unsharded_gradients"] == pytest.approx(table.stored_bytes, abs=SCALARS)
    assert not between.start["sharded_gradients"]


def test_adapters_alone_have_gradients(tiny, runs):
    table, segments = make_units(wide_job(tiny, **RUNS["adapters"]), 2), runs["adapters"]
    last = _one(segments, "optimizer_step", "optimizer")
    assert last.end["sharded_gradients"] == pytest.approx(4 * table.trainable / 2, abs=SCALARS)
    assert 0 < max(s.peak.get("unsharded_gradients", 0) for s in segments) < 4 * table.trainable


def test_what_rests_on_the_host_is_offloaded(runs):
    states = runs["states offloaded"][-1].end
    assert states["offloaded"] == pytest.approx(2 * states["sharded_parameters"], abs=SCALARS)
    assert not states.get("optimizer_states")
    weights = runs["weights offloaded"][-1].end
    assert weights["offloaded"] == pytest.approx(4 * states["sharded_parameters"], abs=SCALARS)
    assert not any(weights.get(c) for c in ("sharded_parameters", "sharded_gradients", "optimizer_states"))
