"""docs/accuracy.md is what the predictions are."""

from __future__ import annotations

import importlib.util

from house.source import ROOT


def test_the_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("make_accuracy", ROOT / "docs" / "make_accuracy.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TARGET.read_text() == module.page(), "run: python docs/make_accuracy.py"
