"""Bytes on the wire, from the kernel's counters of a network interface."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

INTERFACE_VARIABLE = "SHARDWISE_LAB_IFACE"
"""Environment variable in which a lab tells its processes the name of their host's interface."""


@dataclass(frozen=True, kw_only=True)
class WireCounters:
    """What an interface has sent and received since it was made; the difference of two is the traffic between them."""

    tx_bytes: int
    """Bytes sent, Ethernet, IP and TCP headers included."""
    rx_bytes: int
    """Bytes received, headers included."""
    tx_packets: int
    """Packets sent."""
    rx_packets: int
    """Packets received."""

    def __sub__(self, earlier: WireCounters) -> WireCounters:
        """Return the traffic since `earlier`."""
        return WireCounters(
            tx_bytes=self.tx_bytes - earlier.tx_bytes,
            rx_bytes=self.rx_bytes - earlier.rx_bytes,
            tx_packets=self.tx_packets - earlier.tx_packets,
            rx_packets=self.rx_packets - earlier.rx_packets,
        )


def read_counters(interface: str) -> WireCounters:
    """Return the counters of one interface of this host; OSError when there is no such interface."""
    folder = Path("/sys/class/net") / interface / "statistics"

    def count(name: str) -> int:
        return int((folder / name).read_text())

    return WireCounters(
        tx_bytes=count("tx_bytes"),
        rx_bytes=count("rx_bytes"),
        tx_packets=count("tx_packets"),
        rx_packets=count("rx_packets"),
    )


def wire_counters() -> WireCounters:
    """Return the counters of the lab host that this process runs on, shared by all ranks of the host.

    RuntimeError outside a lab: other interfaces carry traffic that is not the job's.
    """
    interface = os.environ.get(INTERFACE_VARIABLE)
    if not interface:
        raise RuntimeError(f"this process was not started by a lab: {INTERFACE_VARIABLE} is not set")
    return read_counters(interface)
