"""docs/configuration.md is what the schema says."""

from __future__ import annotations

import importlib.util

import pytest

from house.source import ROOT
from shardwise.spec.problems import BadInput
from shardwise.spec.reader import read_job_dict
from shardwise.spec.wording import SECTIONS


def _script():
    script = ROOT / "docs" / "make_configuration.py"
    spec = importlib.util.spec_from_file_location("make_configuration", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_section_has_a_paragraph_and_no_other():
    module = _script()
    assert set(module.PARAGRAPHS) == set(SECTIONS)
    assert set(module.MAPPINGS_ONLY) <= set(SECTIONS)
    for section in module.MAPPINGS_ONLY:
        with pytest.raises(BadInput, match="must be a mapping"):
            read_job_dict({"model": "m", "data": "d", section: 1})


def test_the_page_is_up_to_date():
    module = _script()
    assert module.TARGET.read_text() == module.page(), "run: python docs/make_configuration.py"
