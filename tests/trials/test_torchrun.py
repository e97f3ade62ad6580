"""torchrun across the hosts of a lab, and what gloo really sends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.trials.lab import Lab
from shardwise.trials.processes import HostsFailed

from .conditions import needs_lab

pytestmark = [needs_lab, pytest.mark.slow]

HEAD = """
import json, os, time
import torch, torch.distributed as dist
from shardwise.trials.wire import wire_counters
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
"""

ALL_GATHER = """
mine, whole = torch.full((1 << 18,), float(rank)), torch.empty(world << 18)
dist.barrier()
before, start = wire_counters(), time.perf_counter()
for _ in range(8):
    dist.all_gather_into_tensor(whole, mine)
seconds = time.perf_counter() - start
dist.barrier()
after = wire_counters() - before
right = whole.view(world, -1).mean(dim=1).tolist() == list(range(world))
print(json.dumps({"tx": after.tx_bytes, "rx": after.rx_bytes, "seconds": seconds, "right": right}))
dist.destroy_process_group()
"""


def script(folder: Path, text: str) -> list[str]:
    path = folder / "job.py"
    path.write_text(HEAD + text)
    return [str(path)]


def test_an_all_gather_sends_each_hosts_part_once(tmp_path):
    payload = 8 * (1 << 20)
    with Lab(mbit_per_s=200) as lab:
        factor = lab.header_factor()
        outputs = lab.torchrun(script(tmp_path, ALL_GATHER), timeout_s=120)
    for output in outputs:
        seen = json.loads(output.stdout)
        assert seen["right"]
        assert seen["tx"] == pytest.approx(payload * factor, rel=0.05)
        assert seen["rx"] == pytest.approx(payload * factor, rel=0.05)
        assert seen["seconds"] > 0.8 * payload * 8 / 200e6


NUMBERS = """
total = torch.tensor(rank)
dist.all_reduce(total)
print(json.dumps([rank, world, os.environ["LOCAL_RANK"], os.environ["SHARDWISE_LAB_IFACE"], total.item()]))
dist.destroy_process_group()
"""


def test_ranks_are_numbered_host_by_host(tmp_path):
    with Lab(hosts=3, mbit_per_s=200) as lab:
        outputs = lab.torchrun(script(tmp_path, NUMBERS), ranks_per_host=2, timeout_s=180)
    shown = [sorted(json.loads(line) for line in output.stdout.splitlines()) for output in outputs]
    assert shown == [
        [[2 * host, 6, "0", "lab0", 15], [2 * host + 1, 6, "1", "lab0", 15]] for host in range(len(outputs))
    ]


FAILS = """
if rank == 1:
    raise SystemExit("rank 1 gives up")
dist.barrier()
"""


def test_a_rank_that_fails_ends_the_job_and_is_quoted(tmp_path):
    with Lab(mbit_per_s=200) as lab:
        with pytest.raises(HostsFailed, match=r"host [01] ended with exit code 1") as caught:
            lab.torchrun(script(tmp_path, FAILS), timeout_s=120)
        assert "rank 1 gives up" in caught.value.outputs[1].stderr
