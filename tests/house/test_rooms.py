"""The rooms of the package: who may import whom, who works without torch, who may reach below public interfaces."""

from __future__ import annotations

import ast
import subprocess
import sys

from house.source import PACKAGE, ROOMS, TORCH_FREE, Module, imports, is_private, modules

LIBRARIES = ("torch", "transformers", "peft", "safetensors", "accelerate")
COMPAT = ("engine/compat.py", "engine/compat_fake.py", "engine/compat_memory.py", "engine/compat_shard.py")


def test_every_folder_is_a_known_room():
    folders = {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert folders <= set(ROOMS), f"add it to ROOMS, in order: {sorted(folders - set(ROOMS))}"


def test_rooms_import_only_from_rooms_above_them():
    wrong = []
    for module in modules():
        if module.room is None:
            continue
        allowed = ROOMS[: ROOMS.index(module.room) + 1]
        for line, name in imports(module):
            if name.split(".")[0] != "shardwise":
                continue
            room = [*name.split("."), ""][1]
            if room not in allowed:
                wrong.append(f"{module.place}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


BLOCKED_IMPORT = """
import importlib, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "peft"):
            raise ImportError(f"{name} is blocked in this test")
sys.meta_path.insert(0, Blocker())
for name in sys.argv[1:]:
    importlib.import_module(name)
from shardwise.cli.main import app
app(["--help"])
"""


def test_spec_report_and_help_work_without_torch():
    names = [module.name for module in modules() if module.room in TORCH_FREE]
    done = subprocess.run([sys.executable, "-c", BLOCKED_IMPORT, *names], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout


def test_private_symbols_of_libraries_only_in_compat():
    wrong = []
    own = _private_names_of_the_package()
    for module in modules():
        if module.place in COMPAT:
            continue
        for line, name in imports(module):
            if name.split(".")[0] in LIBRARIES and any(is_private(part) for part in name.split(".")):
                wrong.append(f"{module.place}:{line} imports {name}")
        for line, name in _private_attributes(module):
            if name not in own:
                wrong.append(f"{module.place}:{line} uses .{name}")
    assert not wrong, "use them through " + " or ".join(COMPAT) + ":\n" + "\n".join(wrong)


def _private_names_of_the_package() -> set[str]:
    """Private names that the package defines itself: functions, classes, variables, attributes of self, fields."""
    names = set()
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                names.add(node.attr)
    return {name for name in names if is_private(name)}


def _private_attributes(module: Module):
    """Yield (line, name) of private attributes of anything but self and cls, `getattr(x, "_name")` included."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not _is_self(node.value):
            yield node.lineno, node.attr
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr", "setattr")
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
            and is_private(str(node.args[1].value))
        ):
            yield node.lineno, str(node.args[1].value)


def _is_self(node: ast.expr) -> bool:
    """Tell whether `node` is the object itself; `os` counts too, for os._exit is documented."""
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "os")
