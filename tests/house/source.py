"""The package's source as syntax trees, read once, and what the tests of this folder ask of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "shardwise"

ROOMS = (
    *("spec", "catalogue", "report", "engine", "measure", "predict", "planner"),
    *("data", "state", "train", "machine", "trials", "interop", "cli"),
)
"""Each room imports only from itself and from rooms before it."""

TORCH_FREE = ("spec", "catalogue", "report", "planner")
"""Rooms whose modules work where torch is not installed."""


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def place(self) -> str:
        """Path from the package, as `engine/apply.py`."""
        return self.path.relative_to(PACKAGE).as_posix()

    @property
    def name(self) -> str:
        """Dotted name."""
        parts = self.path.relative_to(PACKAGE.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str | None:
        """Folder that it lies in; None at the top of the package."""
        parts = self.path.relative_to(PACKAGE).parts
        return parts[0] if len(parts) > 1 else None


@cache
def modules() -> tuple[Module, ...]:
    """Every module of the package."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found.append(Module(path, text, ast.parse(text, str(path))))
    return tuple(found)


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of everything imported, inside functions too: `a.b` for `from a import b`."""
    package = module.name.split(".") if module.path.name == "__init__.py" else module.name.split(".")[:-1]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def is_private(name: str) -> bool:
    """Tell whether a name is private by Python's convention."""
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[Function]:
    """Yield every function and method, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def public_definitions(body: list[ast.stmt]) -> Iterator[Function | ast.ClassDef]:
    """Yield public classes, functions and methods; what is nested in a function is not public."""
    for node in body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            yield node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node
            yield from public_definitions(node.body)
