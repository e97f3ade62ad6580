"""The constants of the predictions: few, bounded, explained, each prediction's in one place."""

from __future__ import annotations

import ast

import pytest

from house.source import modules
from shardwise.predict import constants
from shardwise.predict.constants import CONSTANTS, MOST, Constant
from shardwise.predict.links import constants as links
from shardwise.predict.pace import constants as pace

OF_TIME = (*pace.CONSTANTS, *links.CONSTANTS)
PLACES = ("predict/constants.py", "predict/links/constants.py", "predict/pace/constants.py")


@pytest.mark.parametrize("module", [constants, links, pace], ids=lambda module: module.__name__)
def test_all_are_listed(module):
    found = {name: value for name, value in vars(module).items() if isinstance(value, Constant)}
    assert {constant.name: constant for constant in module.CONSTANTS} == found


def test_there_are_few_and_none_has_another_s_name():
    assert len(CONSTANTS) <= MOST == 12
    assert len(OF_TIME) <= MOST
    assert len({constant.name for constant in (*CONSTANTS, *OF_TIME)}) == len(CONSTANTS) + len(OF_TIME)


@pytest.mark.parametrize("constant", [*CONSTANTS, *OF_TIME], ids=lambda constant: constant.name)
def test_each_is_bounded_and_explained(constant):
    assert 0 <= constant.low < constant.high
    assert constant.low <= constant.value <= constant.high
    assert constant.unit in ("bytes", "ratio", "seconds", "elements")
    assert len(constant.meaning.split()) > 5
    assert any(char.isdigit() for char in constant.source), "a source has a figure or a number"


def test_constants_are_made_in_these_files_alone():
    made = {
        module.place
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Constant"
    }
    assert made == set(PLACES)
