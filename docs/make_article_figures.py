"""Write docs/article_figures.md, the article's figures and where they hold: python docs/make_article_figures.py"""

from __future__ import annotations

from pathlib import Path

from article_communication import nodes, prefetch, strategies
from article_costs import checkpointing, offload
from pages import write

TARGET = Path(__file__).with_name("article_figures.md")


HEAD = """# The article's figures

Made by `python docs/make_article_figures.py`; a test holds it up to date. The article gives figures without the models
and machines they are of. Here they are predicted over models from 7B to 70B and over cards and networks from Ethernet
to InfiniBand: speeds of the catalogue, none measured on these machines. How far predictions are off:
[accuracy.md](accuracy.md).

| the article says | and that |
|---|---|
"""


def page() -> str:
    """Return the whole page."""
    sections = [make() for make in (prefetch, strategies, checkpointing, offload, nodes)]
    lines = [f"| {one.claim} | {one.verdict} |" for one in sections]
    for one in sections:
        lines += ["", f"## {one.claim}", "", *one.lines]
    return HEAD + "\n".join(lines) + "\n"


PAGES = {TARGET: page}
"""Page -> what makes its whole text."""


if __name__ == "__main__":
    write(PAGES)
