"""Run a function on several ranks: processes forked from this one, connected by gloo.

    def body(rank: int, world: int, scale: float) -> float:
        value = torch.tensor(scale * rank)
        dist.all_reduce(value)
        return value.item()

    assert run_ranks(body, 2, 3.0) == [3.0, 3.0]

Forking after the imports makes a case cost 0.2 s instead of 5 s. It is safe as long as the parent makes no process
group and runs no kernel on several threads; hence the imports and `set_num_threads` below.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import peft  # noqa: F401
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2  # noqa: F401
from torch.distributed.fsdp import fully_shard  # noqa: F401

torch.set_num_threads(1)

_GRACE = 3.0
"""Seconds that the other ranks get to report after the first failure."""


def run_ranks(fn: Callable[..., Any], world: int, *args: object, timeout: float = 60) -> list[Any]:
    """Run `fn(rank, world, *args)` in `world` processes with a gloo group; return the results by rank.

    Results are pickled by value (return plain tensors, not DTensors). `fn` may be a closure; what it changes in memory
    is lost with its process. Raises AssertionError with the traceback of the first rank that failed, or, after
    `timeout` seconds, with the stack of every rank that was still running.
    """
    assert not dist.is_initialized(), "the parent of forked ranks must have no process group"
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        children = [_Child(rank, world, folder, fn, args, timeout) for rank in range(world)]
        try:
            return _collect(children, time.monotonic() + timeout)
        finally:
            for child in children:
                child.end()


class _Child:
    """One forked rank, seen from the parent."""

    def __init__(
        self, rank: int, world: int, folder: Path, fn: Callable[..., Any], args: tuple[object, ...], timeout: float
    ) -> None:
        self.rank = rank
        self.stack = folder / f"stack-{rank}"
        self.pipe, theirs = connection.Pipe(duplex=False)
        self.exit_code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self.pipe.close()
            _child(rank, world, folder, theirs, lambda: fn(rank, world, *args), timeout)
        theirs.close()

    def answer(self) -> tuple[bool, Any]:
        """Return (succeeded, result or traceback) once the pipe is readable."""
        try:
            ok, value = pickle.loads(self.pipe.recv_bytes())
        except EOFError:
            self._wait(time.monotonic() + _GRACE)
            return False, f"died without a result, exit code {self.exit_code}\n"
        return ok, value

    def where(self) -> str:
        """Return the Python stack of a rank that is still running."""
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(0.2)
        return self.stack.read_text() if self.stack.exists() else "(no stack)"

    def end(self) -> None:
        """Let the process exit, or kill it."""
        self._wait(time.monotonic() + _GRACE)
        if self.exit_code is None:
            os.kill(self.pid, signal.SIGKILL)
            self._wait(time.monotonic() + _GRACE)
        self.pipe.close()

    def _wait(self, deadline: float) -> None:
        while self.exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                return
            else:
                time.sleep(0.005)


def _collect(children: list[_Child], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[int, str]] = []
    waiting = {child.pipe: child for child in children}
    while waiting:
        ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            child = waiting.pop(pipe)  # type: ignore[call-overload]
            ok, value = child.answer()
            if ok:
                results[child.rank] = value
                continue
            if not failures:
                deadline = min(deadline, time.monotonic() + _GRACE)
            failures.append((child.rank, value))
    if failures or waiting:
        stuck = (
            [] if failures else [f"rank {child.rank} is still running:\n{child.where()}" for child in waiting.values()]
        )
        for child in waiting.values():
            os.kill(child.pid, signal.SIGKILL)
        raise AssertionError("\n".join([*_told(failures, len(children)), *stuck]))
    return [results[child.rank] for child in children]


def _told(failures: list[tuple[int, str]], world: int) -> list[str]:
    """The first failure in full, the last line of the others; those whose peer went away come after their cause."""
    failures.sort(key=lambda failure: "by peer" in failure[1])
    lines = [f"rank {rank} of {world} failed:\n{text}" for rank, text in failures[:1]]
    return lines + [f"then rank {rank} failed: {text.strip().splitlines()[-1]}" for rank, text in failures[1:]]


def _child(
    rank: int, world: int, folder: Path, pipe: connection.Connection, body: Callable[[], Any], timeout: float
) -> None:
    """Run in the forked process; never returns."""
    gc.freeze()  # the collector would copy the parent's pages just by looking at them
    try:
        with open(folder / f"stack-{rank}", "w") as stack:
            faulthandler.register(signal.SIGUSR1, file=stack)
            answer, ok = _outcome(rank, world, folder, body, timeout)
            pipe.send_bytes(answer)
            sys.stdout.flush()
            if ok:
                _leave_together()
    finally:
        os._exit(0)


def _outcome(rank: int, world: int, folder: Path, body: Callable[[], Any], timeout: float) -> tuple[bytes, bool]:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), OMP_NUM_THREADS="1"
    )
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=min(timeout, 30)),
        )
        return pickle.dumps((True, body())), True
    except BaseException:  # noqa: BLE001 - whatever it is, the parent reports it
        return pickle.dumps((False, traceback.format_exc())), False


def _leave_together() -> None:
    """Keep this rank's sockets open until its peers are done; a failed rank leaves at once, which wakes the others."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.barrier()
