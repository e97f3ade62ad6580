"""The article's case comes out as docs/scaling.md says."""

from __future__ import annotations

import re

import make_scaling

from house.source import ROOT


def test_sixteen_cards_are_not_twice_eight_on_the_article_s_networks():
    """On every one of them, flat and with all weights trained; on an adapter per card they nearly are."""
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| all weights \|.*\(`([\w-]+)`\) \| [\d,]+ to [\d,]+: \*\*([\d.]+)x\*\*", page, re.MULTILINE)
    assert {network for network, _ in rows} == set(make_scaling.NETWORKS)
    for network, gain in rows:
        assert (float(gain) > 1.8) == (network == "ib-8x200"), (network, gain)
