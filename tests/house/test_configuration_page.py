"""docs/configuration.md is what the schema says."""

from __future__ import annotations

import make_configuration
import pytest

from shardwise.spec.problems import BadInput
from shardwise.spec.reader import read_job_dict
from shardwise.spec.wording import SECTIONS


def test_every_section_has_a_paragraph_and_no_other():
    assert set(make_configuration.PARAGRAPHS) == set(SECTIONS)
    assert set(make_configuration.MAPPINGS_ONLY) <= set(SECTIONS)
    for section in make_configuration.MAPPINGS_ONLY:
        with pytest.raises(BadInput, match="must be a mapping"):
            read_job_dict({"model": "m", "data": "d", section: 1})
