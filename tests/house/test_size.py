"""Files and functions that a reader can hold in the head, and public names that say what they do."""

from __future__ import annotations

import ast

from house.source import functions, modules, public_definitions

FILE_LINES = 400
FUNCTION_LINES = 60


def test_no_file_is_too_long():
    lengths = {module.place: module.text.count("\n") for module in modules()}
    assert not {place: lines for place, lines in lengths.items() if lines > FILE_LINES}


def test_no_function_is_too_long():
    lengths = {
        f"{module.place}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for module in modules()
        for node in functions(module.tree)
    }
    assert not {place: lines for place, lines in lengths.items() if lines > FUNCTION_LINES}


def test_everything_public_is_documented():
    bare = [module.place for module in modules() if ast.get_docstring(module.tree) is None]
    bare += [
        f"{module.place}:{node.lineno} {node.name}"
        for module in modules()
        for node in public_definitions(module.tree.body)
        if ast.get_docstring(node) is None
    ]
    assert not bare, "without a docstring:\n" + "\n".join(bare)
