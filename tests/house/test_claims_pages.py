"""docs/directions.md and docs/article_figures.md are what the model of time says."""

from __future__ import annotations

import importlib.util

import pytest

from house.source import ROOT


@pytest.mark.parametrize("name", ["make_directions", "make_article_figures"])
def test_the_page_is_up_to_date(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TARGET.read_text(encoding="utf-8") == module.page(), f"run: python docs/{name}.py"
