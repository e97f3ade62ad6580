"""README.md and docs show what the code says and the estimate answers."""

from __future__ import annotations

import re

import make_figures
from make_figures import device_of

from house.source import ROOT


def test_the_readme_shows_the_command_that_makes_its_answer():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ").split())
    case = f"--model {make_figures.CASE_MODEL} --cluster {make_figures.CASE_CLUSTER} {' '.join(make_figures.CASE)}"
    assert f"shardwise plan {case}" in text


def test_the_article_s_figure_comes_out_where_the_page_says():
    page = (ROOT / "docs" / "article.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (\d+) to (\d+) \|$", page, re.MULTILINE)
    assert [int(micro) for micro, _, _ in rows] == list(make_figures.MICRO_BATCHES)
    for micro, shortest, longest in (map(int, row) for row in rows):
        lengths = (shortest - 1, shortest, longest, longest + 1)
        before, *inside, behind = [device_of(make_figures._with(length, micro)).total.value for length in lengths]
        assert all(make_figures.LOW <= size <= make_figures.HIGH for size in inside)
        assert before < make_figures.LOW
        assert behind > make_figures.HIGH


def test_each_of_the_four_measures_is_worth_something():
    sizes = {
        name: device_of(make_figures.planned(*make_figures.CASE, make_figures.CASE_ROWS, *settings)).needed.value
        for name, settings in make_figures.WITHOUT.items()
    }
    whole = sizes.pop("all four")
    assert len(sizes) == 4
    assert all(size > whole + 2**30 for size in sizes.values())
