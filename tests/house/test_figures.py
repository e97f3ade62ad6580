"""README.md and docs show what the code says and the estimate answers."""

from __future__ import annotations

import importlib.util
import re

import pytest

from house.source import ROOT


def _script():
    spec = importlib.util.spec_from_file_location("make_figures", ROOT / "docs" / "make_figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = _script()


@pytest.mark.parametrize("path", SCRIPT.PAGES, ids=lambda path: path.name)
def test_a_page_is_up_to_date(path):
    assert path.read_text(encoding="utf-8") == SCRIPT.page(path), "run: python docs/make_figures.py"


def test_the_readme_shows_the_command_that_makes_its_answer():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ").split())
    assert f"shardwise plan --model {SCRIPT.CASE_MODEL} --cluster {SCRIPT.CASE_CLUSTER} {' '.join(SCRIPT.CASE)}" in text


def test_the_article_s_figure_comes_out_where_the_page_says():
    page = (ROOT / "docs" / "article.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (\d+) to (\d+) \|$", page, re.MULTILINE)
    assert [int(micro) for micro, _, _ in rows] == list(SCRIPT.MICRO_BATCHES)
    for micro, shortest, longest in (map(int, row) for row in rows):
        inside = [SCRIPT.device_of(SCRIPT._with(length, micro)).total.value for length in (shortest, longest)]
        outside = [SCRIPT.device_of(SCRIPT._with(length, micro)).total.value for length in (shortest - 1, longest + 1)]
        assert all(SCRIPT.LOW <= size <= SCRIPT.HIGH for size in inside)
        assert outside[0] < SCRIPT.LOW
        assert outside[1] > SCRIPT.HIGH


def test_each_of_the_four_measures_is_worth_something():
    sizes = {
        name: SCRIPT.device_of(SCRIPT.planned(*SCRIPT.CASE, SCRIPT.CASE_ROWS, *settings)).needed.value
        for name, settings in SCRIPT.WITHOUT.items()
    }
    whole = sizes.pop("all four")
    assert len(sizes) == 4
    assert all(size > whole + 2**30 for size in sizes.values())
