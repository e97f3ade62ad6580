"""Predicted against measured step times on CPUs, for many plans: python bench/time_lab.py [--json]

Two hosts of a lab (`docs/lab.md`, needs root), one rank on each, at several rates of the link between them. At each
rate `shardwise probe` first measures devices and links and writes a cluster file; every plan is predicted from that
file alone. Then all plans train the same model in turns, forward and backward through the list, so that drift of the
machine meets all alike. Printed per plan: predicted and measured seconds a step (median over rounds, and the band in
which they lie); over all: median and largest error, and Kendall's tau between predicted and measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import torch.distributed as dist
from planned_step import PlannedStep, planned_step, random_rows, save_llama
from transformers.utils.logging import disable_progress_bar

from shardwise.catalogue.cluster_file import read_cluster
from shardwise.catalogue.models import find_model
from shardwise.predict.step_time import timeline_of
from shardwise.spec.plan import Plan
from shardwise.spec.workload import Workload
from shardwise.trials.lab import Lab, unavailable

VOCAB, ROWS, LENGTH, BLOCKS = 101, 4, 256, 8
FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
BF16 = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
TWICE = {"global_batch": 4 * ROWS}

PLANS: dict[str, dict[str, object]] = {
    "FULL_SHARD": {"fsdp": "full_shard"},
    "FULL_SHARD, prefetch 1": {"fsdp": "full_shard", "prefetch": 1},
    "FULL_SHARD, nothing in the background": {
        "fsdp": "full_shard",
        "prefetch": {"forward": 0, "backward": 0, "async_all_gather": False},
        "reduce_scatter": {"asynchronous": False},
    },
    "FULL_SHARD, bf16": {"fsdp": "full_shard", "mixed_precision": BF16},
    "FULL_SHARD, checkpointing": {"fsdp": "full_shard", "activation_checkpointing": True},
    "FULL_SHARD, 2 micro-batches": {"fsdp": "full_shard", **TWICE},
    "FULL_SHARD, 2 micro-batches, deferred": {"fsdp": "full_shard", "accumulation": "defer_all", **TWICE},
    "SHARD_GRAD_OP": {"fsdp": "shard_grad_op"},
    "SHARD_GRAD_OP, bf16": {"fsdp": "shard_grad_op", "mixed_precision": BF16},
    "NO_SHARD": {"fsdp": "no_shard"},
}
"""Name -> settings of a job."""

Times = dict[str, list[float]]
"""Name of a plan -> seconds of each round."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One plan at one rate."""

    plan: str
    """Its name."""
    mbit_per_s: float
    """Rate of the link."""
    predicted_s: float
    """Seconds a step, before anything ran but the probe."""
    measured_s: float
    """Median over rounds."""
    fastest_s: float
    """The fastest round."""
    slowest_s: float
    """The slowest."""
    exposed_s: float
    """Predicted: communication under which nothing is computed."""

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted_s / self.measured_s - 1


def settings_of(name: str) -> dict[str, object]:
    """Return the settings of a job."""
    plain = {"mixed_precision": FP32, "micro_batch": ROWS, "global_batch": 2 * ROWS, "seq_len": LENGTH}
    return {**plain, **PLANS[name]}


def measure(folder: str, rounds: int, names: Sequence[str]) -> dict[str, object]:
    """Time plans in turns on the ranks of an initialised process group; the first round warms up."""
    made = {name: planned_step(folder, settings_of(name)) for name in names}
    seconds: Times = {name: [] for name in made}
    for number in range(rounds + 1):
        for name in list(made) if number % 2 == 0 else list(reversed(made)):
            taken = _seconds_of(made[name], number)
            if number:
                seconds[name].append(taken)
    plans = {name: one.plan.model_dump(mode="json") for name, one in made.items()}
    return {"seconds": seconds, "plans": plans}


def _seconds_of(made: PlannedStep, number: int) -> float:
    steps = made.plan.accumulation_steps
    seed = 1000 * number + dist.get_rank()
    batches = [random_rows(VOCAB, ROWS, LENGTH, seed + 100 * step) for step in range(steps)]
    dist.barrier()
    started = time.perf_counter()
    made.step(batches)
    dist.barrier()
    return time.perf_counter() - started


def work(given: argparse.Namespace) -> None:
    """Be one rank; rank 0 writes what was measured."""
    disable_progress_bar()
    dist.init_process_group("gloo")
    found = measure(given.folder, given.rounds, given.plans)
    if dist.get_rank() == 0:
        Path(given.folder, "measured.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def at_rate(lab: Lab, folder: Path, rate: float, given: argparse.Namespace) -> list[Row]:
    """Probe and measure at one rate of the link; returns a row per plan."""
    lab.set_rate(rate)
    probed = folder / f"cluster-{rate:g}.yaml"
    command = str(Path(sys.executable).with_name("shardwise"))
    lab.torchrun([command, "probe", "-o", str(probed)], timeout_s=300)
    words = ["--worker", "--folder", str(folder), "--rounds", str(given.rounds), "--plans", *given.plans]
    lab.torchrun([__file__, *words], timeout_s=1800)
    found = json.loads((folder / "measured.json").read_text())
    cluster = read_cluster(probed)
    workload = Workload(model=find_model(str(folder)), seq_len=LENGTH, held_out=False)
    rows = []
    for name, seconds in found["seconds"].items():
        made = timeline_of(workload, Plan.model_validate_json(json.dumps(found["plans"][name])), cluster)
        row = Row(
            plan=name,
            mbit_per_s=rate,
            predicted_s=made.step_s,
            measured_s=statistics.median(seconds),
            fastest_s=min(seconds),
            slowest_s=max(seconds),
            exposed_s=made.exposed_s,
        )
        rows.append(row)
    return rows


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Return how far two orders agree: pairs ordered alike less pairs ordered otherwise, over all pairs."""
    signs = [((a - c) * (b - d) > 0) - ((a - c) * (b - d) < 0) for (a, b), (c, d) in combinations(pairs, 2)]
    return sum(signs) / len(signs)


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Return errors over all plans and rates."""
    return {
        "plans": len(rows),
        "median_error": statistics.median(abs(row.error) for row in rows),
        "largest_error": max((row.error for row in rows), key=abs),
        "kendall_tau": kendall_tau([(row.predicted_s, row.measured_s) for row in rows]),
    }


def show(rows: Sequence[Row], total: dict[str, float]) -> None:
    """Print all rows, as `docs/time_lab.md` has them."""
    print("| Mbit/s | plan | predicted | measured | all rounds | error |")
    print("|--:|---|--:|--:|--:|--:|")
    for row in rows:
        seconds = f"{row.predicted_s:.2f} s | {row.measured_s:.2f} s | {row.fastest_s:.2f} .. {row.slowest_s:.2f} s"
        print(f"| {row.mbit_per_s:g} | {row.plan} | {seconds} | {row.error:+.1%} |")
    print(
        f"{total['plans']:g} plans: median error {total['median_error']:.1%}, largest {total['largest_error']:+.1%}, "
        f"Kendall's tau {total['kendall_tau']:.2f}"
    )


def run(given: argparse.Namespace) -> None:
    """Start the hosts and print what they found."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as made, Lab(hosts=2, mbit_per_s=given.rates[0], large_packets=True) as lab:
        folder = Path(made)
        save_llama(folder, blocks=BLOCKS, vocab=VOCAB, length=LENGTH)
        for rate in given.rates:
            rows += at_rate(lab, folder, rate, given)
    total = summary(rows)
    if given.json:
        print(json.dumps({"rounds": given.rounds, "rows": [asdict(row) for row in rows], **total}))
        return
    show(rows, total)


def main(words: Sequence[str] | None = None) -> None:
    """Start the hosts, or be a rank on one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[200.0, 1000.0], help="of the link, Mbit/s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plans", nargs="+", choices=list(PLANS), default=list(PLANS), metavar="NAME")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.worker:
        work(given)
    elif reason := unavailable():
        sys.exit(reason)
    else:
        run(given)


if __name__ == "__main__":
    main()
