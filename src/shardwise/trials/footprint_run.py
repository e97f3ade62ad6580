"""A plan's Footprint from a run: its ranks as processes of this machine, loading and stepping as in training."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from shardwise.spec.cluster import Cluster
from shardwise.spec.footprint import Footprint, Instant, LargestBuffer
from shardwise.spec.job import Job
from shardwise.spec.plan import Plan
from shardwise.spec.problems import BadInput, Problem
from shardwise.spec.report import Report
from shardwise.trials.processes import HostsFailed, SideBySide

TIMEOUT_S = 600.0
"""For all ranks together."""

RESULT = "footprint.json"
"""What rank 0 leaves."""


def footprint_run(job: Job, plan: Plan, cluster: Cluster) -> Report:
    """Run two steps of a plan on rows of random tokens, and return what was alive on rank 0.

    Args:
        job: What is asked for; its model must be here, with weights. Its data is not read.
        plan: The decisions.
        cluster: Must be CPU processes of one machine.

    Raises:
        BadInput: another kind of cluster, or the model is not here.
        HostsFailed: a rank failed or all took too long.
    """
    if cluster.device_type != "cpu" or cluster.nodes > 1:
        reason = "a run needs CPU processes of this machine"
        raise BadInput(Problem(field="cluster", value=cluster.name, reason=reason, fix="use 2xcpu, or --by trace"))
    from shardwise.engine.source import open_source

    open_source(job.model)  # what is wrong with it is said once, not by every rank
    world = plan.mesh.world
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world))}
    with (
        tempfile.TemporaryDirectory(prefix="shardwise-run-") as name,
        SideBySide(environment={**threads, **os.environ}) as ranks,
    ):
        folder = Path(name)
        (folder / "job.json").write_text(job.model_dump_json())
        (folder / "plan.json").write_text(plan.model_dump_json())
        for rank in range(world):
            ranks.start(rank, [sys.executable, "-m", "shardwise.trials.footprint_rank", name, str(rank)])
        in_time = ranks.wait(TIMEOUT_S)
        if ranks.first_failure or not in_time:
            ranks.kill()
            reason = ranks.first_failure.replace("host", "rank") or f"the ranks took more than {TIMEOUT_S:.0f} s"
            raise HostsFailed(reason, ranks.outputs())
        found = json.loads((folder / RESULT).read_text())
    footprint = Footprint(
        peaks=tuple(Instant(**instant) for instant in found["peaks"]), largest_buffer=LargestBuffer(**found["largest"])
    )
    notes = (f"run: {world} processes, two steps of random tokens, every row {job.seq_len} tokens long",)
    return Report(instrument="run", plan=plan, footprint=footprint, notes=notes)
