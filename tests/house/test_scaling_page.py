"""docs/scaling.md and docs/timeline.md show what the estimate answers, and the article's case comes out as they say."""

from __future__ import annotations

import importlib.util
import re

import pytest

from house.source import ROOT


def _script():
    spec = importlib.util.spec_from_file_location("make_scaling", ROOT / "docs" / "make_scaling.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = _script()


@pytest.mark.parametrize("path", SCRIPT.PAGES, ids=lambda path: path.name)
def test_a_page_is_up_to_date(path):
    assert path.read_text(encoding="utf-8") == SCRIPT.page(path), "run: python docs/make_scaling.py"


def test_sixteen_cards_are_not_twice_eight_on_the_article_s_networks():
    """On every one of them, flat and with all weights trained; on an adapter per card they nearly are."""
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| all weights \|.*\(`([\w-]+)`\) \| [\d,]+ to [\d,]+: \*\*([\d.]+)x\*\*", page, re.MULTILINE)
    assert {network for network, _ in rows} == set(SCRIPT.NETWORKS)
    for network, gain in rows:
        assert (float(gain) > 1.8) == (network == "ib-8x200"), (network, gain)
