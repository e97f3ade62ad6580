"""What the scripts that make pages share. Each has PAGES: page -> what makes its whole text.

python docs/pages.py    # makes all of them again
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from textwrap import fill

ROOT = Path(__file__).resolve().parents[1]

Pages = Mapping[Path, Callable[[], str]]
"""Page -> what makes its whole text."""

Parts = Mapping[str, Callable[[], Iterator[str]]]
"""Name of a part of a page -> what makes its lines; the rest of the page is written by hand."""

SCRIPTS = tuple(sorted(path.stem for path in Path(__file__).parent.glob("make_*.py")))
"""All of them."""


def spliced(path: Path, parts: Parts) -> str:
    """Return a page with its parts, each between two comments that name it, made anew."""
    text = path.read_text(encoding="utf-8")
    for name, make in parts.items():
        begin, end = f"<!-- made: {name} -->\n", f"<!-- end: {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        assert found, f"{path.name} has no {begin!r}"
        assert closed, f"{path.name} has no {end!r}"
        text = before + begin + "\n" + "\n".join(make()).strip() + "\n\n" + end + after
    return text


def filled(text: str, further: str = "") -> str:
    """Return a paragraph in lines of 120 characters; those behind the first begin with `further`."""
    words = " ".join(text.split())
    return fill(words, 120, subsequent_indent=further, break_long_words=False, break_on_hyphens=False)


def write(pages: Pages) -> None:
    """Make pages anew."""
    for path, make in pages.items():
        path.write_text(make(), encoding="utf-8")


def all_pages() -> dict[str, Pages]:
    """Return the pages of every script, by its name."""
    return {name: import_module(name).PAGES for name in SCRIPTS}


if __name__ == "__main__":
    for made in all_pages().values():
        write(made)
