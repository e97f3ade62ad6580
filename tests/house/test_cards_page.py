"""docs/cards.md and docs/clusters.md are what the catalogue says."""

from __future__ import annotations

import importlib.util

from house.source import ROOT


def test_the_pages_are_up_to_date():
    spec = importlib.util.spec_from_file_location("make_cards", ROOT / "docs" / "make_cards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TARGET.read_text() == module.page(), "run: python docs/make_cards.py"
    assert module.CLUSTERS.read_text() == module.clusters_page(), "run: python docs/make_cards.py"
