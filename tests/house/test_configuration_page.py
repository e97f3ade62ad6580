"""docs/configuration.md is what the schema says."""

from __future__ import annotations

import importlib.util

from house.source import ROOT


def test_the_page_is_up_to_date():
    script = ROOT / "docs" / "make_configuration.py"
    spec = importlib.util.spec_from_file_location("make_configuration", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TARGET.read_text() == module.page(), "run: python docs/make_configuration.py"
