"""Starting ranks on this machine with torchrun, those of a prepared run among them, and reading how they ended."""

from __future__ import annotations

import logging
import os
from importlib import import_module
from typing import Any, Literal

from shardwise.report.run_folder import RunFolder, RunInfo

EXIT_BY_STATE = {"finished": 0, "unverified": 1, "stopped": 3}
"""Exit code of `shardwise train` for each state that the ranks left behind; any other is 4: the run failed."""

Ended = Literal["ended", "stopped", "failed"]
"""How ranks ended: by themselves, by a signal to this process, or with an exit code other than 0."""


def _silence_elastic() -> None:
    """What the ranks say is enough; torchrun's own table of failures would bury it."""
    for name in list(logging.Logger.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.run")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def run_ranks(words: list[str], *, ranks: int, device_type: str) -> Ended:
    """Run torchrun in this process until every rank has ended, and return how.

    SIGINT and SIGTERM are passed on to the ranks, which have torchrun's grace time.

    Args:
        words: What each rank is: `-m`, a module and its arguments.
        ranks: How many.
        device_type: `cuda` or `cpu`; ranks on CPUs share the cores.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if device_type == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    torchrun: Any = import_module("torch.distributed.run")
    _silence_elastic()
    try:
        torchrun.run(torchrun.parse_args(["--standalone", f"--nproc-per-node={ranks}", *words]))
    except SignalException:
        return "stopped"
    except ChildFailedError:
        return "failed"
    return "ended"


def launch(folder: RunFolder, info: RunInfo) -> int:
    """Run the ranks of a prepared run until every one has ended; returns the exit code for the user.

    Signalled, they save a checkpoint within torchrun's grace time.
    """
    words = ["-m", "shardwise.cli.rank", str(folder.path)]
    signalled = run_ranks(words, ranks=info.world, device_type=info.device_type) == "stopped"
    status = folder.read_status()
    state = status["state"]
    if state == "prepared" and signalled:
        again = f"resume with: {info.resume_command}" if info.resume_from else "start it again when you like"
        print(f"stopped before a step of this start was done; {again}", flush=True)
        return 3
    if state not in (*EXIT_BY_STATE, "failed"):
        print(
            f"the ranks ended at step {status['step']} without a word; resume with: {info.resume_command}", flush=True
        )
    return EXIT_BY_STATE.get(state, 4)
