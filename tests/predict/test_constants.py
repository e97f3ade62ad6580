"""The constants of the memory prediction: few, bounded, explained, in one place."""

from __future__ import annotations

import ast

import pytest

from house.source import modules
from shardwise.predict import constants
from shardwise.predict.constants import CONSTANTS, MOST, Constant


def test_all_are_listed_and_there_are_few():
    found = {name: value for name, value in vars(constants).items() if isinstance(value, Constant)}
    assert len(CONSTANTS) <= MOST == 12
    assert {constant.name: constant for constant in CONSTANTS} == found
    assert len({constant.name for constant in CONSTANTS}) == len(CONSTANTS)


@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda constant: constant.name)
def test_each_is_bounded_and_explained(constant):
    assert 0 <= constant.low < constant.high
    assert constant.low <= constant.value <= constant.high
    assert constant.unit in ("bytes", "ratio")
    assert len(constant.meaning.split()) > 5
    assert any(char.isdigit() for char in constant.source), "a source has a figure or a number"


def test_constants_are_made_in_this_file_alone():
    made = {
        module.place
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Constant"
    }
    assert made == {"predict/constants.py"}
