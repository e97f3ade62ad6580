"""A lab: hosts on one machine with a link of a known rate, torchrun across them, and bytes counted on the wire.

    with Lab(hosts=2, mbit_per_s=200) as lab:
        before = lab.counters()
        outputs = lab.torchrun(["train.py", "job.yaml"], timeout_s=600)
        sent = [after - start for after, start in zip(lab.counters(), before, strict=True)]

Needs Linux, root, and the commands `ip` and `tc`; `unavailable()` says what is missing.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.spec.problems import BadInput, Problem

from . import transfer
from .network import INTERFACE, Network, NetworkError, address, remove_leftovers
from .processes import HostOutput, HostsFailed, SideBySide
from .wire import INTERFACE_VARIABLE, WireCounters

MOST_HOSTS = 8
KNOWN_TRANSFER_BYTES = 4 << 20
LARGE_SEGMENTS = 40
"""Segments of one large packet."""


class LabUnavailable(RuntimeError):
    """This machine cannot make a lab; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One TCP transfer between two hosts of a lab."""

    payload_bytes: int
    """Bytes that the receiver's program read."""
    seconds: float
    """From the accepted connection to the last byte, seen by the receiver."""
    wire_bytes: int
    """Bytes that the two hosts sent: data, acknowledgements and all headers."""

    @property
    def mbit_per_s(self) -> float:
        """Payload rate in 10^6 bits per second; headers take about 5 % of the link's rate."""
        return self.payload_bytes * 8 / self.seconds / 1e6


def unavailable() -> str:
    """Return why this machine cannot make a lab, "" when it can; the answer of a first try to build one is kept."""
    if not sys.platform.startswith("linux"):
        return "a lab is made of Linux network namespaces; this is " + sys.platform
    if os.geteuid() != 0:
        return "a lab needs root, to make network namespaces"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"a lab needs the command {' and '.join(missing)} (package iproute2)"
    return _why_no_network()


@functools.cache
def _why_no_network() -> str:
    network = Network(hosts=2)
    try:
        network.build(mbit_per_s=100.0)
        network.remove()
    except NetworkError as error:
        return f"a lab cannot be built here: {error}"
    return ""


class Lab:
    """Hosts joined by a switch, each by one full-duplex link. A context manager: gone at its end."""

    def __init__(self, *, hosts: int = 2, mbit_per_s: float | None, large_packets: bool = False) -> None:
        """Describe a lab; entering the context builds it.

        `mbit_per_s` is the rate of every link in each direction, in 10^6 bits per second of Ethernet frames; None
        leaves links as fast as the machine. `large_packets` hands several segments to the link at once, as cards with
        segmentation offload do: less work for this machine's cores, at the price of counters that may miss headers.
        BadInput for other than 2 to 8 hosts or a rate that is not positive.
        """
        if not 2 <= hosts <= MOST_HOSTS:
            reason = "a lab cannot have that many hosts" if hosts > MOST_HOSTS else "a lab joins hosts by a link"
            raise BadInput(Problem(field="hosts", value=hosts, reason=reason, allowed=f"2 to {MOST_HOSTS}"))
        _check_rate(mbit_per_s)
        self.hosts = hosts
        self.mbit_per_s = mbit_per_s
        self.large_packets = large_packets
        self._network: Network | None = None
        self._busy = threading.Lock()
        self._ports = itertools.count(29500)
        self._header_factor: float | None = None

    def __enter__(self) -> Lab:
        """Remove what dead owners left, then build; LabUnavailable, or NetworkError when a command fails."""
        if reason := unavailable():
            raise LabUnavailable(reason)
        remove_leftovers()
        network = Network(hosts=self.hosts, segments=LARGE_SEGMENTS if self.large_packets else 1)
        network.build(mbit_per_s=self.mbit_per_s)
        self._network = network
        return self

    def __exit__(self, *_: object) -> None:
        """Kill what runs on the hosts and remove them."""
        network, self._network = self._open, None
        network.remove()

    @property
    def _open(self) -> Network:
        if self._network is None:
            raise RuntimeError("this lab is not open: use it inside `with Lab(...) as lab:`")
        return self._network

    def set_rate(self, mbit_per_s: float | None, *, host: int | None = None) -> None:
        """Change every link's rate (or one host's) at once, open connections included; None lifts the limit."""
        _check_rate(mbit_per_s)
        if host is not None and not 0 <= host < self.hosts:
            raise BadInput(Problem(field="host", value=host, reason="no such host", allowed=f"0 to {self.hosts - 1}"))
        self._open.shape(mbit_per_s, host=host)
        if host is None:
            self.mbit_per_s = mbit_per_s

    def counters(self) -> tuple[WireCounters, ...]:
        """Return each host's counters, in the order of hosts."""
        return tuple(self._open.counters(host) for host in range(self.hosts))

    def run(
        self,
        commands: Mapping[int, Sequence[str]],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> tuple[HostOutput, ...]:
        """Run one command on each host named, all at once, and return what they left.

        Their environment is this process's, with one OpenMP thread, gloo on the lab's interface, and then `env`.
        However it ends, nothing that was started is left running. When one fails, the others are killed 10 seconds
        later. HostsFailed when not all end within `timeout_s` seconds and, with `check`, when one failed. One run at
        a time in a lab.
        """
        network = self._open
        if unknown := sorted(set(commands) - set(range(self.hosts))):
            raise BadInput(
                Problem(field="commands", value=unknown, reason="no such host", allowed=f"0 to {self.hosts - 1}")
            )
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("something runs in this lab already: wait for it, or make a second lab")
        try:
            with SideBySide(environment=_environment(env or {})) as together:
                try:
                    for host, words in commands.items():
                        together.start(host, ["ip", "netns", "exec", network.hosts[host], *words])
                    in_time = together.wait(timeout_s)
                finally:
                    together.kill()
                    network.kill_processes()
                outputs = together.outputs()
        finally:
            self._busy.release()
        if not in_time:
            raise HostsFailed(f"not done after {timeout_s:g} s", outputs)
        if check and together.first_failure:
            raise HostsFailed(together.first_failure, outputs)
        return outputs

    def torchrun(
        self,
        script_and_args: Sequence[str],
        *,
        timeout_s: float,
        ranks_per_host: int = 1,
        env: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> tuple[HostOutput, ...]:
        """Run a script under torchrun on all hosts, and return each host's output; otherwise like `run`.

        The rendezvous is static at host 0. Ranks are numbered host by host; they can read their host's counters with
        `shardwise.trials.wire.wire_counters`.
        """
        if ranks_per_host < 1:
            raise BadInput(Problem(field="ranks_per_host", value=ranks_per_host, reason="too few", allowed="1 or more"))
        port = next(self._ports)
        start = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(self.hosts)]
        start += ["--nproc-per-node", str(ranks_per_host), "--master-addr", address(0), "--master-port", str(port)]
        commands = {host: [*start, "--node-rank", str(host), *script_and_args] for host in range(self.hosts)}
        return self.run(commands, timeout_s=timeout_s, env=env, check=check)

    def transfer(self, payload_bytes: int, *, source: int = 0, target: int = 1) -> Transfer:
        """Send `payload_bytes` over one TCP connection from one host to another and measure it."""
        if payload_bytes < 1:
            raise BadInput(Problem(field="payload_bytes", value=payload_bytes, reason="too few", allowed="1 or more"))
        if source == target:
            raise BadInput(Problem(field="target", value=target, reason="is the source", allowed="another host"))
        script, port = [sys.executable, "-I", str(Path(transfer.__file__))], str(next(self._ports))
        least_seconds = payload_bytes * 8 / 1e6 / (self.mbit_per_s or math.inf)
        before = self.counters()
        outputs = self.run(
            {
                target: [*script, "receive", port],
                source: [*script, "send", port, address(target), str(payload_bytes)],
            },
            timeout_s=60 + 3 * least_seconds,
        )
        after = self.counters()
        received = json.loads(outputs[0].stdout)
        return Transfer(
            payload_bytes=received["bytes"],
            seconds=received["seconds"],
            wire_bytes=sum((after[host] - before[host]).tx_bytes for host in (source, target)),
        )

    def header_factor(self) -> float:
        """Return bytes on the wire, both directions, per byte of payload; measured once, by a transfer of 4 MiB."""
        if self._header_factor is None:
            known = self.transfer(KNOWN_TRANSFER_BYTES)
            self._header_factor = known.wire_bytes / known.payload_bytes
        return self._header_factor

    def idle_bytes_per_s(self, seconds: float) -> float:
        """Return bytes per second that all hosts together send while this call waits `seconds`: the background."""
        before = self.counters()
        start = time.monotonic()
        time.sleep(seconds)
        after = self.counters()
        elapsed = time.monotonic() - start
        return sum((late - early).tx_bytes for late, early in zip(after, before, strict=True)) / elapsed


def _check_rate(mbit_per_s: float | None) -> None:
    if mbit_per_s is not None and not 0 < mbit_per_s < math.inf:
        raise BadInput(
            Problem(
                field="mbit_per_s",
                value=mbit_per_s,
                reason="not a rate",
                allowed="a number above 0, in 10^6 bits per second, or None for links without a limit",
            )
        )


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    ours = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE, INTERFACE_VARIABLE: INTERFACE}
    return {**os.environ, **ours, **extra}
