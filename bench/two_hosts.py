"""Bytes that cross between two hosts in a step, by the kernel and by the plan: python bench/two_hosts.py

Four ranks, two on each host of a lab (`docs/lab.md`, needs root). For each layout: the difference of the interfaces'
counters over some steps after a warm-up, less an idle period of equal length, divided by the header factor of one known
transfer in the same lab; beside it what the plan sends by its closed formula and gloo's algorithms.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch.distributed as dist
from planned_step import planned_step, random_rows, save_llama
from transformers.utils.logging import disable_progress_bar

from shardwise.engine.mesh import data_rank
from shardwise.predict.collectives import collectives_of_step
from shardwise.predict.wire import Traffic, between_hosts
from shardwise.report.terminal import bytes_text
from shardwise.trials.lab import Lab, unavailable
from shardwise.trials.wire import WireCounters, wire_counters

LAYOUTS: dict[str, dict[str, object]] = {
    "FULL_SHARD": {"fsdp": "full_shard"},
    "SHARD_GRAD_OP": {"fsdp": "shard_grad_op"},
    "HYBRID_SHARD 2x2": {"fsdp": "hybrid_shard", "mesh": {"replicate": 2, "shard": 2}},
    "tensor 2 x FULL_SHARD 2": {"fsdp": "full_shard", "mesh": {"tensor": 2}},
}
RANKS_PER_HOST, HOSTS = 2, 2
VOCAB, LENGTH, WARM_UP = 102, 64, 2


def measure(layout: dict[str, object], folder: str, steps: int) -> dict[str, object]:
    """Train and count on this rank's host; returns the host's bytes and the plan's."""
    values = {"micro_batch": 1, "global_batch": 4, "seq_len": LENGTH, **layout}
    made = planned_step(folder, values)
    mesh = made.plan.mesh
    number, place = itertools.count(), data_rank(mesh, dist.get_rank())

    def step() -> None:
        seeds = [1000 * next(number) + place for _ in range(made.plan.accumulation_steps)]
        made.step([random_rows(VOCAB, 1, LENGTH, seed) for seed in seeds])

    for _ in range(WARM_UP):
        step()
    before, started = _settled_counters(), time.perf_counter()
    for _ in range(steps):
        step()
    after, seconds = _settled_counters(), time.perf_counter() - started
    time.sleep(seconds)
    idle = wire_counters() - after
    hosts = [rank // RANKS_PER_HOST for rank in range(mesh.world)]
    # What the tensor axis exchanges stays inside a host.
    planned = collectives_of_step(made.plan, made.units, device_type="cpu", leave_tensor_out=True)
    plan = sum(between_hosts(planned, mesh, hosts).values(), Traffic())
    return {
        "counted": (after - before).tx_bytes - idle.tx_bytes,
        "planned": plan.payload_bytes * steps,
        "messages": plan.messages * steps,
    }


def _settled_counters() -> WireCounters:
    """Return this host's counters at a moment when no rank sends."""
    dist.barrier()
    time.sleep(0.3)
    counters = wire_counters()
    time.sleep(0.3)
    dist.barrier()
    return counters


def work(given: argparse.Namespace) -> None:
    """Be one rank; the first of each host writes what its host sent."""
    disable_progress_bar()
    dist.init_process_group("gloo")
    found = {name: measure(layout, given.folder, given.steps) for name, layout in LAYOUTS.items()}
    if int(os.environ["LOCAL_RANK"]) == 0:
        Path(given.folder, f"host-{dist.get_rank() // RANKS_PER_HOST}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run(given: argparse.Namespace) -> dict[str, object]:
    """Start the hosts; returns what they found."""
    with tempfile.TemporaryDirectory() as folder, Lab(hosts=HOSTS, mbit_per_s=given.mbit_per_s) as lab:
        save_llama(Path(folder), blocks=4, vocab=VOCAB, length=LENGTH)
        factor = lab.header_factor()
        words = [__file__, "--worker", "--folder", folder, "--steps", str(given.steps)]
        lab.torchrun(words, ranks_per_host=RANKS_PER_HOST, timeout_s=600)
        hosts = [json.loads(Path(folder, f"host-{host}.json").read_text()) for host in range(HOSTS)]
    layouts = {}
    for name in LAYOUTS:
        counted = sum(host[name]["counted"] for host in hosts) / given.steps
        planned = hosts[0][name]["planned"] / given.steps
        layouts[name] = {
            "counted_bytes": counted,
            "payload_bytes": counted / factor,
            "planned_bytes": planned,
            "messages": hosts[0][name]["messages"] / given.steps,
            "ratio": counted / factor / planned,
        }
    return {"header_factor": factor, "steps": given.steps, "mbit_per_s": given.mbit_per_s, "layouts": layouts}


def show(found: dict[str, object]) -> None:
    """Print the table."""
    print(f"header factor of a known transfer: {found['header_factor']:.3f}; {found['steps']} steps, per step:")
    print(f"{'layout':26}{'on the wire':>14}{'/ factor':>14}{'plan':>14}{'ratio':>8}")
    layouts: dict[str, dict[str, float]] = found["layouts"]  # type: ignore[assignment]
    for name, row in layouts.items():
        cells = (bytes_text(row[key]) for key in ("counted_bytes", "payload_bytes", "planned_bytes"))
        print(f"{name:26}" + "".join(f"{cell:>14}" for cell in cells) + f"{row['ratio']:>8.3f}")


def main() -> None:
    """Start the hosts, or be a rank on one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mbit-per-s", type=float, default=1000.0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if given.worker:
        work(given)
        return
    reason = unavailable()
    if reason:
        sys.exit(f"not measured: {reason}")
    found = run(given)
    print(json.dumps(found)) if given.json else show(found)


if __name__ == "__main__":
    main()
