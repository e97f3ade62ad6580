"""A script for torchrun on the hosts of a lab: real steps of several jobs, and what each host sent for them.

    host_steps.py JOBS_FILE

Rank 0 of each host prints one JSON line per job: counted collectives and bytes that the host sent per step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from measure.steps import prepared  # noqa: E402
from shardwise.measure.collectives import CollectiveCounter  # noqa: E402
from shardwise.spec.job import Job  # noqa: E402
from shardwise.trials.wire import wire_counters  # noqa: E402

STEPS = 3


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for line in Path(sys.argv[1]).read_text().splitlines():
        step, mesh = prepared(rank, world, Job.model_validate_json(line))
        with CollectiveCounter(mesh) as counter:
            step()
        dist.barrier()
        time.sleep(0.5)
        before = wire_counters()
        time.sleep(0.2)
        for _ in range(STEPS):
            step()
        time.sleep(0.8)
        sent = (wire_counters() - before).tx_bytes
        time.sleep(0.5)
        if os.environ["LOCAL_RANK"] == "0":
            print(json.dumps({"collectives": counter.collectives.model_dump(), "sent": sent / STEPS}), flush=True)
    dist.destroy_process_group()


main()
