"""Sentences in a terminal, continued on further lines where they are longer than one."""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.text import Text

INDENT = "  "
_NARROWEST = 40


def print_sentence(console: Console, text: str, style: str = "", *, indent: str = INDENT) -> None:
    """Print words, continued below where they are longer than the line.

    Args:
        console: Where to print; the width is its own.
        text: The words.
        style: Of all of them.
        indent: Before the first line; further lines stand two columns deeper.
    """
    width = max(console.width, _NARROWEST)
    for line in textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False
    ):
        console.print(Text(line, style), soft_wrap=True, highlight=False)
