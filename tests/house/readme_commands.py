"""Run the commands that a Markdown file shows: python tests/house/readme_commands.py README.md --done "make test"

Blocks marked bash are run whole, blocks marked console line by line where a line starts with "$ ". A comment
<!-- not run: REASON --> on the line before a block leaves it out.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>.+?) -->[ \t]*\n\s*?)?^```(?P<language>bash|console)[ \t]*\n(?P<body>.*?)^```",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One fenced block of commands."""

    line: int
    """Line of the file where its fence opens."""
    commands: tuple[str, ...]
    """Commands, continued lines joined; comments left out."""
    not_run: str | None
    """Why it is not to be run; None when it is."""


def blocks(text: str) -> list[Block]:
    """Return the command blocks of a Markdown text."""
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        commands = tuple(_commands(match["body"], console=match["language"] == "console"))
        found.append(Block(line=line, commands=commands, not_run=match["reason"]))
    return found


def _commands(body: str, *, console: bool) -> Iterator[str]:
    lines = body.replace("\\\n", "").splitlines()
    if console:
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    for line in lines:
        command = re.sub(r"(^|\s+)# .*$", "", line).strip()
        if command:
            yield re.sub(r"\s+", " ", command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is not done yet; returns 1 at the first command that fails."""
    parser = argparse.ArgumentParser(description="Run the commands that a Markdown file shows.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--done", action="append", default=[], help="a command that has run already")
    given = parser.parse_args(arguments)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for block in blocks(given.file.read_text(encoding="utf-8")):
        place = f"{given.file}:{block.line}"
        if block.not_run is not None:
            print(f"{place}: not run: {block.not_run}", flush=True)
            continue
        commands = [command for command in block.commands if command not in given.done]
        if not commands:
            print(f"{place}: has run already: {'; '.join(block.commands)}", flush=True)
            continue
        print(f"{place}:", *commands, sep="\n  $ ", flush=True)
        started = time.perf_counter()
        script = "\n".join(["set -euo pipefail", *commands])
        done = subprocess.run(["bash", "-c", script], env=environment, stdin=subprocess.DEVNULL, check=False)
        print(f"{place}: exit code {done.returncode}, {time.perf_counter() - started:.0f} s", flush=True)
        if done.returncode != 0:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
