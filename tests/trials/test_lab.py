"""A lab's links have the rate asked for, its counters count every byte, and labs do not meet."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.spec.problems import BadInput
from shardwise.trials import lab as lab_module
from shardwise.trials import transfer
from shardwise.trials.lab import Lab, LabUnavailable, unavailable
from shardwise.trials.network import INTERFACE, Network, NetworkError, address
from shardwise.trials.wire import INTERFACE_VARIABLE, wire_counters

from .conditions import needs_lab

MIB = 1 << 20
SEGMENT = (1500 + 14) / (1500 - 20 - 32)
"""Wire bytes per payload byte of a full segment: Ethernet 14, IP 20, TCP 20 and its timestamps 12."""


@needs_lab
@pytest.mark.parametrize("mbit_per_s", [200, 50])
def test_a_link_has_the_rate_that_was_asked_for(mbit_per_s):
    payload = mbit_per_s * 10**6 // 8 // 2
    with Lab(mbit_per_s=mbit_per_s) as lab:
        done = lab.transfer(payload)
        assert done.payload_bytes == payload
        assert done.mbit_per_s * SEGMENT == pytest.approx(mbit_per_s, rel=0.2)


@needs_lab
def test_counters_hold_the_payload_and_every_header():
    with Lab(mbit_per_s=200) as lab:
        factor = lab.header_factor()
        before = lab.counters()
        done = lab.transfer(3 * MIB, source=1, target=0)
        target, source = (after - start for after, start in zip(lab.counters(), before, strict=True))
    assert source.tx_bytes == pytest.approx(3 * MIB * SEGMENT, rel=0.005)
    assert (target.rx_bytes, target.rx_packets) == (source.tx_bytes, source.tx_packets)
    assert (source.rx_bytes, source.rx_packets) == (target.tx_bytes, target.tx_packets)
    assert done.wire_bytes == source.tx_bytes + target.tx_bytes
    assert done.wire_bytes / done.payload_bytes == pytest.approx(factor, rel=0.02)


@needs_lab
def test_an_idle_lab_is_silent():
    with Lab(hosts=3, mbit_per_s=200) as lab:
        assert lab.idle_bytes_per_s(0.5) == 0


@needs_lab
def test_the_rate_changes_while_a_lab_is_open():
    with Lab(mbit_per_s=None) as lab:
        unlimited = lab.transfer(4 * MIB).mbit_per_s
        lab.set_rate(50)
        assert lab.transfer(MIB).mbit_per_s * SEGMENT == pytest.approx(50, rel=0.2)
        lab.set_rate(100)
        assert lab.transfer(2 * MIB).mbit_per_s * SEGMENT == pytest.approx(100, rel=0.2)
        lab.set_rate(None)
        assert min(unlimited, lab.transfer(4 * MIB).mbit_per_s) > 150


@needs_lab
def test_one_hosts_link_changes_alone():
    """Host 2 is slow in both directions; hosts 0 and 1 still reach each other at 200 Mbit/s."""
    with Lab(hosts=3, mbit_per_s=200) as lab:
        lab.set_rate(50, host=2)
        assert lab.transfer(2 * MIB, source=0, target=1).mbit_per_s * SEGMENT == pytest.approx(200, rel=0.2)
        assert lab.transfer(MIB, source=0, target=2).mbit_per_s * SEGMENT == pytest.approx(50, rel=0.2)
        assert lab.transfer(MIB, source=2, target=1).mbit_per_s * SEGMENT == pytest.approx(50, rel=0.2)
        with pytest.raises(BadInput, match="no such host"):
            lab.set_rate(50, host=3)


RECEIVE_TWO = """
import json, socket, sys, threading, time
def read(connection):
    while connection.recv(1 << 16):
        pass
with socket.create_server(("", 4000)) as server:
    connections = [server.accept()[0] for _ in range(2)]
start = time.perf_counter()
readers = [threading.Thread(target=read, args=(connection,)) for connection in connections]
for reader in readers:
    reader.start()
for reader in readers:
    reader.join()
print(json.dumps(time.perf_counter() - start))
"""


@needs_lab
def test_four_hosts_and_two_that_send_to_one_share_its_link():
    send = [sys.executable, transfer.__file__, "send", "4000", address(3), str(2 * MIB)]
    with Lab(hosts=4, mbit_per_s=100) as lab:
        outputs = lab.run({3: [sys.executable, "-c", RECEIVE_TWO], 0: send, 2: send}, timeout_s=30)
        counters = lab.counters()
    seconds = json.loads(outputs[0].stdout)
    assert [output.host for output in outputs] == [3, 0, 2]
    assert 4 * MIB * 8 / 1e6 / seconds == pytest.approx(100 / SEGMENT, rel=0.2)
    assert counters[1].tx_bytes == 0
    assert counters[0].tx_bytes == pytest.approx(2 * MIB * SEGMENT, rel=0.02)


@needs_lab
def test_two_labs_at_the_same_time_do_not_meet():
    with Lab(mbit_per_s=200) as first, Lab(mbit_per_s=50) as second:
        assert first.transfer(2 * MIB).mbit_per_s > 150
        assert second.counters()[0].tx_bytes == 0
        assert second.transfer(MIB).mbit_per_s < 60


@needs_lab
def test_the_machine_keeps_its_own_network():
    def interfaces() -> set[str]:
        return {folder.name for folder in Path("/sys/class/net").iterdir()}

    before = interfaces()
    with Lab(mbit_per_s=100):
        assert interfaces() == before


@needs_lab
def test_a_process_on_a_host_reads_that_hosts_counters():
    read = "from shardwise.trials.wire import wire_counters as w; print(w().tx_bytes, w().rx_bytes, w().tx_packets)"
    with Lab(mbit_per_s=200) as lab:
        lab.transfer(MIB)
        outputs = lab.run({host: [sys.executable, "-c", read] for host in range(2)}, timeout_s=30)
        shown = [[int(word) for word in output.stdout.split()] for output in outputs]
        assert shown == [[one.tx_bytes, one.rx_bytes, one.tx_packets] for one in lab.counters()]


def test_counters_are_refused_outside_a_lab(monkeypatch):
    monkeypatch.delenv(INTERFACE_VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match=INTERFACE_VARIABLE):
        wire_counters()


def test_without_root_a_lab_says_so(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "root" in unavailable()
    with pytest.raises(LabUnavailable, match="root"), Lab(mbit_per_s=200):
        pass


def test_without_its_commands_a_lab_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "ip and tc" in unavailable()


def test_a_machine_that_refuses_namespaces_is_quoted(monkeypatch):
    def refuse(self, **_):
        raise NetworkError("`ip netns add x`: Operation not permitted")

    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(Network, "build", refuse)
    lab_module._why_no_network.cache_clear()
    try:
        assert "Operation not permitted" in unavailable()
    finally:
        lab_module._why_no_network.cache_clear()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"hosts": 1, "mbit_per_s": 200}, "hosts"),
        ({"hosts": 9, "mbit_per_s": 200}, "hosts"),
        ({"mbit_per_s": 0}, "mbit_per_s"),
        ({"mbit_per_s": float("nan")}, "mbit_per_s"),
        ({"mbit_per_s": float("inf")}, "mbit_per_s"),
    ],
)
def test_a_lab_that_cannot_be_is_refused(options, field):
    with pytest.raises(BadInput) as caught:
        Lab(**options)
    assert caught.value.problems[0].field == field
    assert caught.value.problems[0].allowed


@needs_lab
def test_what_a_lab_cannot_do_is_refused():
    lab = Lab(mbit_per_s=200)
    with pytest.raises(RuntimeError, match="not open"):
        lab.counters()
    with lab:
        for wrong in (
            lambda: lab.set_rate(-1),
            lambda: lab.transfer(0),
            lambda: lab.transfer(MIB, source=1, target=1),
            lambda: lab.run({2: ["true"]}, timeout_s=5),
            lambda: lab.torchrun(["x.py"], ranks_per_host=0, timeout_s=5),
        ):
            with pytest.raises(BadInput):
                wrong()
        assert lab.mbit_per_s == 200


@needs_lab
def test_loopback_works_on_every_host():
    listen = "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())"
    with Lab(mbit_per_s=200) as lab:
        lab.run({host: [sys.executable, "-c", listen] for host in range(2)}, timeout_s=10)


@needs_lab
def test_the_environment_is_the_labs_then_the_callers():
    names = ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "EXTRA")
    show = f"import os; print(*(os.environ[name] for name in {names}))"
    with Lab(mbit_per_s=200) as lab:
        outputs = lab.run(
            {0: [sys.executable, "-c", show]}, env={"EXTRA": "given", "OMP_NUM_THREADS": "2"}, timeout_s=10
        )
    assert outputs[0].stdout.split() == [INTERFACE, "2", "given"]


def test_the_lab_needs_no_torch():
    code = "import sys, shardwise.trials.lab; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
