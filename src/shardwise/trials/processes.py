"""Processes side by side, one per host: started together, ended together, their output kept."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 0.02
GRACE_SECONDS = 10.0
"""After one host failed, the others have this long to say what they saw."""
LAST_LINES = 15


@dataclass(frozen=True, kw_only=True)
class HostOutput:
    """What one host's command left."""

    host: int
    """Number of the host, from 0."""
    exit_code: int
    """0 when it ended well; the negative number of the signal that ended it."""
    stdout: str
    """All that it printed, torchrun's ranks included."""
    stderr: str
    """All that it wrote as errors and logs."""


class HostsFailed(RuntimeError):
    """A command on a host failed or took too long; `outputs` holds what every host had written."""

    def __init__(self, reason: str, outputs: tuple[HostOutput, ...]) -> None:
        self.reason = reason
        self.outputs = outputs
        super().__init__("\n".join([reason, *(_last_words(output) for output in outputs if output.exit_code != 0)]))

    def __reduce__(self) -> tuple[type[HostsFailed], tuple[str, tuple[HostOutput, ...]]]:
        """Keep the outputs when this goes to another process."""
        return type(self), (self.reason, self.outputs)


class SideBySide:
    """Commands on several hosts, one each. A context manager: at its end none of them runs."""

    def __init__(self, *, environment: Mapping[str, str]) -> None:
        self.first_failure = ""
        """Which host failed first, and how; "" while none has. Set by `wait`."""
        self._environment = dict(environment)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="shardwise-lab-")

    def __enter__(self) -> SideBySide:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._folder.cleanup()

    def start(self, host: int, words: Sequence[str]) -> None:
        """Start one host's command, apart from this process's terminal, its output going to files."""
        with self._file(host, "stdout").open("wb") as stdout, self._file(host, "stderr").open("wb") as stderr:
            self._processes[host] = subprocess.Popen(
                words,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def wait(self, timeout_s: float) -> bool:
        """Wait until all have ended, or until one failed and the others had their grace; False when time ran out."""
        deadline = time.monotonic() + timeout_s
        grace = float("inf")
        while True:
            codes = {host: process.poll() for host, process in self._processes.items()}
            failed = [host for host, code in codes.items() if code not in (None, 0)]
            if failed and not self.first_failure:
                self.first_failure = f"host {failed[0]} ended with exit code {codes[failed[0]]}"
                grace = time.monotonic() + GRACE_SECONDS
            now = time.monotonic()
            if None not in codes.values() or now > grace:
                return True
            if now > deadline:
                return False
            time.sleep(POLL_SECONDS)

    def kill(self) -> None:
        """Kill the commands that still run; what they started themselves is the caller's to end."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def outputs(self) -> tuple[HostOutput, ...]:
        """Return what every host left, in the order of starting, once all have ended."""
        return tuple(
            HostOutput(
                host=host,
                exit_code=process.wait(),
                stdout=self._file(host, "stdout").read_text(errors="replace"),
                stderr=self._file(host, "stderr").read_text(errors="replace"),
            )
            for host, process in self._processes.items()
        )

    def _file(self, host: int, stream: str) -> Path:
        return Path(self._folder.name) / f"host{host}.{stream}"


def _last_words(output: HostOutput) -> str:
    """What a host said last, up to where torchrun begins to sum up: the reason stands before that."""
    lines = (output.stderr.strip() or output.stdout.strip()).splitlines()
    summary = next((place for place, line in enumerate(lines) if "failed (exitcode" in line), len(lines))
    lines = (lines[:summary] or lines)[-LAST_LINES:]
    return "\n".join([f"host {output.host} (exit code {output.exit_code}):", *(f"  {line}" for line in lines)])
