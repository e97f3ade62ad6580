"""A function in a process with a network of its own, whose loopback carries nothing else and counts every byte."""

from __future__ import annotations

import ctypes
import fcntl
import os
import pickle
import socket
import struct
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_SET_FLAGS, _UP = 0x8914, 1


def in_own_network(fn: Callable[..., Any], *args: object) -> Any:
    """Return `fn(*args)`, run in a forked process behind a loopback of its own; skips where the kernel refuses one."""
    ours, theirs = connection.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        try:
            theirs.send_bytes(pickle.dumps(_outcome(fn, args)))
        finally:
            os._exit(0)
    theirs.close()
    try:
        kind, value = pickle.loads(ours.recv_bytes())
    finally:
        os.waitpid(pid, 0)
    if kind == "refused":
        pytest.skip(value)
    assert kind == "done", value
    return value


def _outcome(fn: Callable[..., Any], args: tuple[object, ...]) -> tuple[str, Any]:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NET if os.geteuid() == 0 else _NEW_USER | _NEW_NET):
        return "refused", f"no network namespace here: {os.strerror(ctypes.get_errno())}"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh22x", b"lo", _UP))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        return "done", fn(*args)
    except Exception as error:  # noqa: BLE001
        return "failed", repr(error)


def loopback_bytes() -> int:
    """Return the bytes that went over this process's loopback so far, packet headers included."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (loopback,) = (line.split(":")[1].split() for line in lines if line.strip().startswith("lo:"))
    return int(loopback[8])
