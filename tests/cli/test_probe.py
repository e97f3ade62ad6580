"""`shardwise probe`, as people and machines call it, on this machine and between the hosts of a lab."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from harness.ranks import run_ranks
from shardwise.catalogue.clusters import find_cluster
from shardwise.cli import probe_command
from shardwise.cli.main import app
from shardwise.machine import launch
from shardwise.measure.probe import run
from shardwise.measure.probe.team import Team
from shardwise.measure.probe.timing import Limits
from shardwise.spec.cluster import Cluster
from shardwise.spec.problems import BadInput
from shardwise.trials.lab import Lab
from trials.conditions import needs_lab

QUICK = Limits(most_s=0.1, repeats=3, point_s=1.0, least_s=0.001, most_bytes=1 << 16, most_side=64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "2xA99"], "--cluster: 'A99': is not a card"),
        (["--cluster", "8xA10"], "names cards, and this machine has no GPU"),
        (["--cluster", "2x8xcpu"], "has 2 machines, and this command starts ranks on this one alone"),
        (["-o", "no/such/cluster.yaml"], "there is no folder"),
        (["-o", "cluster.txt"], "'cluster.txt': is no cluster's file; allowed: *.yaml"),
        (["-o", "here.yaml"], "'here.yaml': exists; name a new file"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the messages are those of a machine without GPUs")
def test_what_cannot_be_probed_is_refused_before_anything_starts(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    Path("here.yaml").write_text("mine")
    done = CliRunner().invoke(app, ["probe", *arguments])
    assert isinstance(done.exception, BadInput)
    assert message in str(done.exception)
    assert Path("here.yaml").read_text() == "mine"


def _ranks(output: Path, cluster: str | None) -> list[tuple[int, str]]:
    """Be two ranks of torchrun's in a quick probe; return each one's exit code, or what it refused."""

    def body(rank: int, world: int) -> tuple[int, str]:
        probe_command._connect = lambda: torch.device("cpu")
        run.limits_of = lambda device: QUICK
        try:
            return probe_command._be_rank(output, cluster, as_json=True), ""
        except BadInput as error:
            return 2, str(error)

    return run_ranks(body, 2)


def test_rank_0_writes_a_file_that_a_job_takes_as_its_cluster(tmp_path):
    output = tmp_path / "cluster.yaml"
    assert _ranks(output, None) == [(0, ""), (0, "")]
    cluster = find_cluster(str(output))
    assert (cluster.nodes, cluster.per_node, cluster.gpu) == (1, 2, None)
    assert cluster.measured is not None
    assert {each.kind for each in cluster.measured.collectives} == {"all_gather", "reduce_scatter", "all_reduce"}


def test_ranks_that_are_not_what_was_named_end_together(tmp_path):
    output = tmp_path / "cluster.yaml"
    first, second = _ranks(output, "4xcpu")
    assert (first[0], second) == (2, (2, ""))
    assert "there are 1 machines with 2 ranks each" in first[1]
    assert not output.exists()


def test_a_name_given_brings_its_network():
    """Two machines with one rank each, called as typed; a plain count of ranks on several machines is right too."""
    team = Team(rank=0, nodes=2, per_node=1, device=torch.device("cpu"), hosts=("a", "b"))
    found = probe_command._cluster("2x1xcpu eth-10", team)
    assert (found.name, found.network, found.nodes, found.per_node) == ("2x1xcpu eth-10", "eth-10", 2, 1)
    assert probe_command._cluster("2xcpu", team).nodes == 2
    with pytest.raises(BadInput, match="there are 2 machines with 1 ranks each"):
        probe_command._cluster("3x1xcpu", team)


@pytest.mark.parametrize(("ended", "code"), [("ended", 0), ("stopped", 3), ("failed", 4)])
def test_how_the_ranks_end_is_the_commands_exit_code(tmp_path, monkeypatch, ended, code):
    started = []

    def ranks(words: list[str], **given: object) -> launch.Ended:
        started.append(given)
        output.write_text("measured\n")
        return ended

    output = tmp_path / "new.yaml"
    monkeypatch.setattr(launch, "run_ranks", ranks)
    done = CliRunner().invoke(app, ["probe", "--cluster", "4xcpu", "-o", str(output)])
    assert done.exit_code == code
    assert started == [{"ranks": 4, "device_type": "cpu"}]
    assert output.exists() == (ended != "stopped")


def test_detect_is_what_is_found(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(launch, "run_ranks", lambda words, **_: started.append(words) or "ended")
    assert CliRunner().invoke(app, ["probe", "--cluster", "detect", "-o", str(tmp_path / "a.yaml")]).exit_code == 0
    assert "--cluster" not in started[0]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_command_ends_every_rank_and_leaves_no_file(tmp_path, number):
    """Whoever sends it to the command alone, as a job's scheduler does, leaves no rank behind that writes later."""
    words = [sys.executable, "-m", "shardwise.cli.main", "probe", "--cluster", "2xcpu", "-o", str(tmp_path / "a.yaml")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command:
        until = time.monotonic() + 60
        while len(ranks := _ranks_of(tmp_path)) < 3 and time.monotonic() < until:
            time.sleep(0.2)
        assert len(ranks) == 3
        time.sleep(3)  # ranks that import torch die of any signal; what is tested are those that measure
        command.send_signal(number)
        output, error = command.communicate(timeout=60)
    assert command.returncode == 3, error
    assert "Traceback" not in output + error
    assert _ranks_of(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def _ranks_of(folder: Path) -> list[str]:
    """Return the processes that are to write into a folder: the command and its ranks."""
    listed = subprocess.run(["ps", "-ww", "-eo", "stat,args"], capture_output=True, text=True, check=True).stdout
    return [row for row in listed.splitlines() if str(folder) in row and not row.startswith("Z")]


@pytest.mark.slow
def test_alone_on_a_machine(tmp_path):
    words = [sys.executable, "-m", "shardwise.cli.main", "probe", "--cluster", "2xcpu", "--json", "-o", "found.yaml"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert Cluster.model_validate_json(json.dumps(said["cluster"])) == find_cluster(str(tmp_path / "found.yaml"))
    assert {row["unit"] for row in said["curves"]} == {"bytes", "FLOPs"}


@pytest.mark.slow
@needs_lab
def test_two_hosts_are_probed_within_a_minute(tmp_path):
    """200 Mbit/s are 25 MB/s on the wire and 23.9 MB/s of payload in full segments: a gather of 4 MiB, of which each
    host sends half, takes 88 ms."""
    output = tmp_path / "cluster.yaml"
    with Lab(hosts=2, mbit_per_s=200, large_packets=True) as lab:
        started = time.monotonic()
        outputs = lab.torchrun(["-m", "shardwise.cli.main", "probe", "-o", str(output)], timeout_s=120)
        seconds = time.monotonic() - started
    assert seconds < 60
    assert "warning: the link" not in outputs[0].stdout
    cluster = find_cluster(str(output))
    assert (cluster.name, cluster.nodes, cluster.per_node) == ("2x1xcpu", 2, 1)
    assert cluster.measured is not None
    gather, reduce, both = cluster.measured.collectives
    assert gather.curve.seconds(4 << 20) == pytest.approx(0.088, rel=0.15)
    assert reduce.curve.seconds(4 << 20) == pytest.approx(0.088, rel=0.15)
    assert both.curve.seconds(4 << 20) == pytest.approx(2 * 0.088, rel=0.15)


@pytest.mark.slow
@needs_lab
def test_the_host_behind_a_slow_link_is_named(tmp_path):
    with Lab(hosts=3, mbit_per_s=200, large_packets=True) as lab:
        lab.set_rate(100, host=1)
        words = ["-m", "shardwise.cli.main", "probe", "--json", "-o", str(tmp_path / "cluster.yaml")]
        outputs = lab.torchrun(words, timeout_s=180)
    links = [found for found in json.loads(outputs[0].stdout)["findings"] if found["what"] == "link between hosts"]
    assert [found["ranks"] for found in links] == [[1]]
    assert links[0]["factor"] == pytest.approx(2, rel=0.2)
