"""Hosts as network namespaces, wired to one switch by shaped links, and their removal.

All of a lab lives inside its own namespaces: one for the switch, one per host. Nothing is added to the machine's own
network, so interface names and addresses are the same in every lab, and labs do not meet. A namespace's name carries
the owner's process id and start time: that is how leftovers are told from a lab in use.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from .wire import WireCounters

PREFIX = "shardwise-lab"
INTERFACE = "lab0"
"""Name of every host's interface inside its namespace."""

HEADER_BYTES = 14
"""Ethernet header, which the shaper counts and the MTU does not."""
MTU_BYTES = 1500
BURST_SECONDS = 0.001
"""A link that was idle may send this much at once; smaller bursts cost more timer interrupts."""
QUEUE_BYTES = 4 << 20
"""Bytes that wait at each end of a link before packets are dropped."""

_serial = itertools.count()
_NAME = re.compile(rf"{PREFIX}-(?P<pid>\d+)-(?P<started>\d+)-\d+-\w+")


class NetworkError(RuntimeError):
    """A command that builds or removes the network failed; the text holds the command and what it said."""


class Network:
    """One switch and its hosts, as namespaces of this process; `build` makes them, `remove` takes them away."""

    def __init__(self, *, hosts: int, segments: int = 1) -> None:
        stem = f"{PREFIX}-{os.getpid()}-{_start_time(os.getpid())}-{next(_serial)}"
        self.switch = f"{stem}-switch"
        """Name of the switch's namespace."""
        self.hosts = tuple(f"{stem}-host{host}" for host in range(hosts))
        """Names of the hosts' namespaces."""
        self.segments = segments
        """Most segments that one packet holds; with one, counters hold every header."""

    def build(self, *, mbit_per_s: float | None) -> None:
        """Make the namespaces and links, shaped as by `shape`; on an error nothing is left."""
        try:
            for name in (self.switch, *self.hosts):
                _make_namespace(name)
            _batch(self.switch, ["link add switch type bridge stp_state 0 mcast_snooping 0", "link set dev switch up"])
            for host, name in enumerate(self.hosts):
                self._connect(host, name)
            self.shape(mbit_per_s)
        except BaseException:
            self.remove()
            raise

    def _connect(self, host: int, name: str) -> None:
        """Wire one host to the switch."""
        port = f"port{host}"
        _command(["ip", "link", "add", INTERFACE, "netns", name, "type", "veth", "peer", port, "netns", self.switch])
        for namespace, device in ((name, INTERFACE), (self.switch, port)):
            _batch(namespace, [f"link set dev {device} mtu {MTU_BYTES} gso_max_segs {self.segments}"])
        _batch(self.switch, [f"link set dev {port} master switch up"])
        _batch(name, [f"address add {address(host)}/24 dev {INTERFACE}", f"link set dev {INTERFACE} up"])

    def shape(self, mbit_per_s: float | None, *, host: int | None = None) -> None:
        """Limit every link (or one host's), both ways, to a rate in 10^6 bits per second of Ethernet frames; None lifts
        the limit."""
        shaped = range(len(self.hosts)) if host is None else [host]
        ends = [(self.hosts[each], INTERFACE) for each in shaped]
        ends += [(self.switch, f"port{each}") for each in shaped]
        for namespace, device in ends:
            tc = ["tc", "-n", namespace, "qdisc"]
            if mbit_per_s is not None:
                _command([*tc, "replace", "dev", device, "root", *_token_bucket(mbit_per_s)])
            elif "tbf" in _command([*tc, "show", "dev", device]):
                _command([*tc, "delete", "dev", device, "root"])

    def counters(self, host: int) -> WireCounters:
        """Return what one host's interface has sent and received."""
        shown = _command(["ip", "-n", self.hosts[host], "-j", "-s", "link", "show", "dev", INTERFACE])
        totals = json.loads(shown)[0]["stats64"]
        return WireCounters(
            tx_bytes=totals["tx"]["bytes"],
            rx_bytes=totals["rx"]["bytes"],
            tx_packets=totals["tx"]["packets"],
            rx_packets=totals["rx"]["packets"],
        )

    def kill_processes(self) -> None:
        """Kill whatever still runs on the hosts."""
        for name in self.hosts:
            _kill_processes(name)

    def remove(self) -> None:
        """Kill what runs on the hosts and remove every namespace that was made, links included."""
        there = set(_namespaces())
        failures = []
        for name in (*self.hosts, self.switch):
            if name in there:
                try:
                    _remove_namespace(name)
                except NetworkError as error:
                    failures.append(str(error))
        if failures:
            raise NetworkError("; ".join(failures))


def address(host: int) -> str:
    """Return the IPv4 address of a host, the same in every lab."""
    return f"10.77.0.{host + 1}"


def remove_leftovers() -> tuple[str, ...]:
    """Remove the namespaces of labs whose owner has ended, and the processes in them; return their names."""
    removed = []
    for name in _namespaces():
        found = _NAME.fullmatch(name)
        if found and _start_time(int(found["pid"])) != int(found["started"]):
            _remove_namespace(name)
            removed.append(name)
    return tuple(removed)


def _start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot: a pid may be given out twice, this pair is not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state in ("Z", "X") else int(fields[18])


def _make_namespace(name: str) -> None:
    """Make a namespace with loopback up, without IPv6 (its announcements would be counted), with plain TCP."""
    _command(["ip", "netns", "add", name])
    settings = "if [ -e ipv6 ]; then echo 1 > ipv6/conf/all/disable_ipv6; fi; echo reno > ipv4/tcp_congestion_control"
    _command(["ip", "netns", "exec", name, "sh", "-ec", f"cd /proc/sys/net; {settings}"])
    _batch(name, ["link set dev lo up"])


def _remove_namespace(name: str) -> None:
    try:
        _kill_processes(name)
        _command(["ip", "netns", "delete", name])
    except NetworkError:
        if name in _namespaces():  # else another process removed the same leftover first
            raise


def _namespaces() -> list[str]:
    names = [line.split()[0] for line in _command(["ip", "netns", "list"]).splitlines()]
    return [name for name in names if _NAME.fullmatch(name)]


def _kill_processes(name: str) -> None:
    """Kill every process of a namespace; NetworkError when some live on."""
    deadline = time.monotonic() + 10
    while pids := _command(["ip", "netns", "pids", name]).split():
        if time.monotonic() > deadline:
            raise NetworkError(f"processes of {name} do not end: {', '.join(pids)}")
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)


def _token_bucket(mbit_per_s: float) -> list[str]:
    burst = max(2 * (MTU_BYTES + HEADER_BYTES), round(mbit_per_s * 1e6 / 8 * BURST_SECONDS))
    return ["tbf", "rate", f"{round(mbit_per_s * 1e6)}bit", "burst", f"{burst}", "limit", f"{QUEUE_BYTES}"]


def _batch(namespace: str, lines: Sequence[str]) -> None:
    _command(["ip", "-n", namespace, "-batch", "-"], text="\n".join(lines))


def _command(words: Sequence[str], *, text: str = "") -> str:
    """Run one command and return its output; NetworkError with what it said when it fails."""
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise NetworkError(f"`{' '.join([*words, *text.splitlines()])}`: {said}")
    return done.stdout
