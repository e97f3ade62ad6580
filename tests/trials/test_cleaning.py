"""Nothing of a lab outlives it: not after an error, a time-out, or the death of its owner."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.trials import network, processes
from shardwise.trials.lab import Lab
from shardwise.trials.network import PREFIX, remove_leftovers
from shardwise.trials.processes import HostsFailed

from .conditions import needs_lab

pytestmark = needs_lab


def namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"{PREFIX}-{pid}-")]


def pids_on_hosts(pid: int) -> list[int]:
    shown = [
        subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout for name in namespaces(pid)
    ]
    return [int(word) for text in shown for word in text.split()]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited 20 s"
        time.sleep(0.02)


def test_a_lab_is_gone_after_its_end_and_after_an_exception():
    with Lab(mbit_per_s=200):
        assert len(namespaces(os.getpid())) == 3
    assert not namespaces(os.getpid())
    with pytest.raises(KeyboardInterrupt), Lab(hosts=3, mbit_per_s=200):
        raise KeyboardInterrupt
    assert not namespaces(os.getpid())


def test_a_lab_that_cannot_be_finished_leaves_nothing(monkeypatch):
    monkeypatch.setattr(network, "_token_bucket", lambda rate: ["no-such-queue"])
    with pytest.raises(network.NetworkError, match="no-such-queue"), Lab(mbit_per_s=200):
        pass
    assert not namespaces(os.getpid())


OWNER = """
from shardwise.trials.lab import Lab
with Lab(mbit_per_s=200) as lab:
    lab.run({host: ["sh", "-c", "setsid sleep 600 & sleep 600"] for host in range(2)}, timeout_s=600)
"""


def test_the_next_lab_removes_what_a_killed_owner_left_and_spares_the_living():
    with Lab(mbit_per_s=200) as living:
        owner = subprocess.Popen([sys.executable, "-c", OWNER])
        try:
            wait_until(lambda: len(pids_on_hosts(owner.pid)) == 6)
            orphans = pids_on_hosts(owner.pid)
        finally:
            owner.kill()
            owner.wait()
        assert len(namespaces(owner.pid)) == 3
        assert len(orphans) == 6
        with Lab(mbit_per_s=200):
            assert not namespaces(owner.pid)
            assert not [pid for pid in orphans if network._start_time(pid) is not None]
            assert len(namespaces(os.getpid())) == 6
        assert living.transfer(1 << 20).payload_bytes == 1 << 20


def test_a_pid_given_out_again_does_not_keep_a_dead_owners_lab():
    """The name holds this process's pid, which lives, with the start time of another."""
    name = f"{PREFIX}-{os.getpid()}-1-0-host0"
    subprocess.run(["ip", "netns", "add", name], check=True)
    assert name in remove_leftovers()
    assert not namespaces(os.getpid())


def test_a_namespace_that_was_never_finished_is_removed():
    name = f"{PREFIX}-{os.getpid()}-1-0-switch"
    Path("/var/run/netns", name).touch()
    assert name in remove_leftovers()
    assert not namespaces(os.getpid())


def test_namespaces_of_others_are_left_alone():
    name = f"{PREFIX}er-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        assert name not in remove_leftovers()
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


def test_time_out_kills_all_that_was_started(tmp_path):
    tree = ["sh", "-c", "echo started; setsid sleep 600 & sleep 600"]
    with Lab(mbit_per_s=200) as lab:
        with pytest.raises(HostsFailed, match=r"not done after 0\.5 s") as caught:
            lab.run({0: tree, 1: ["true"]}, timeout_s=0.5, check=False)
        assert not pids_on_hosts(os.getpid())
        assert [output.exit_code for output in caught.value.outputs] == [-signal.SIGKILL, 0]
        assert caught.value.outputs[0].stdout == "started\n"
        lab.run({0: ["true"]}, timeout_s=5)


def test_one_failure_ends_the_others_and_is_told(monkeypatch):
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.2)
    commands = {0: ["sleep", "600"], 1: ["sh", "-c", "echo no disk >&2; exit 3"]}
    with Lab(mbit_per_s=200) as lab:
        with pytest.raises(HostsFailed, match=r"host 1 ended with exit code 3[\s\S]*no disk") as caught:
            lab.run(commands, timeout_s=60)
        assert [output.exit_code for output in lab.run(commands, timeout_s=60, check=False)] == [-signal.SIGKILL, 3]
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.outputs) == (str(caught.value), caught.value.outputs)


def test_background_processes_end_with_a_good_run():
    with Lab(mbit_per_s=200) as lab:
        lab.run({0: ["sh", "-c", "setsid sleep 600 &"]}, timeout_s=5)
        assert not pids_on_hosts(os.getpid())


def test_one_run_at_a_time():
    with Lab(mbit_per_s=200) as lab:
        thread = threading.Thread(target=lab.run, args=({0: ["sleep", "1"]},), kwargs={"timeout_s": 10})
        thread.start()
        wait_until(lambda: bool(pids_on_hosts(os.getpid())))
        with pytest.raises(RuntimeError, match="already"):
            lab.run({1: ["true"]}, timeout_s=5)
        thread.join()
        lab.run({1: ["true"]}, timeout_s=5)


def test_output_files_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Lab(mbit_per_s=200) as lab:
        seen = lab.run({0: ["ls", str(tmp_path)]}, timeout_s=5)[0].stdout
    assert seen.startswith("shardwise-lab-")
    assert not list(Path(tmp_path).iterdir())
