"""What the documents say about commands and versions is so."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from house.readme_commands import Block, blocks
from house.source import ROOT

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [
    Requirement(text)
    for group in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for text in group
]
CONSTRAINTS = {
    canonicalize_name(name): version
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_exist(document: Path):
    wrong = [
        f"{document.name}:{block.line}: {problem}"
        for block in blocks(document.read_text(encoding="utf-8"))
        for command in block.commands
        if (problem := _missing(command, installed_here=block.not_run is None))
    ]
    assert not wrong, "\n".join(wrong)


def _missing(command: str, *, installed_here: bool) -> str:
    """Say what a command line names that does not exist; "" when all of it does."""
    words = command.split()
    while words and re.fullmatch(r"[A-Za-z_]\w*=\S*", words[0]):
        words.pop(0)
    if not words or words[0] in ("cd", "source", "export", "git"):
        return ""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    name = words[0].removeprefix(".venv/bin/")
    if installed_here and shutil.which(name, path=path) is None and not (ROOT / name).exists():
        return f"there is no command {name}"
    following = next((word for word in words[1:] if not word.startswith("-") and "=" not in word), None)
    if name == "make" and following is not None:
        return "" if re.search(rf"^{re.escape(following)}:", (ROOT / "Makefile").read_text(), re.M) else command
    if name == "shardwise" and following is not None:
        from shardwise.cli.main import app

        return "" if following in {known.name for known in app.registered_commands} else command
    return ""


def test_blocks_are_found_and_joined():
    text = (
        "# Title\n```bash\nmake demo  # three minutes\n\n```\n"
        "<!-- not run: needs 8 GPUs -->\n```console\n$ torchrun --nproc_per_node=8 \\\n    train.py\nstep 1\n```\n"
        "```python\nmake = 1\n```\n"
    )
    assert blocks(text) == [
        Block(line=2, commands=("make demo",), not_run=None),
        Block(line=7, commands=("torchrun --nproc_per_node=8 train.py",), not_run="needs 8 GPUs"),
    ]


def test_constraints_pin_every_dependency_inside_its_range_without_a_build_label():
    assert not [version for version in CONSTRAINTS.values() if "+" in version]
    for requirement in REQUIREMENTS:
        version = CONSTRAINTS[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} does not allow {version}"


def test_dependencies_document_names_every_dependency_with_its_range():
    text = (ROOT / "docs" / "dependencies.md").read_text()
    before_the_demo, _, _ = text.partition("## The demo")
    documented = {Requirement(name) for name in re.findall(r"^\| `([^`]+)` \|", before_the_demo, re.MULTILINE)}
    assert documented == set(REQUIREMENTS)


def test_documents_name_the_torch_releases_that_are_declared():
    torch = next(requirement for requirement in REQUIREMENTS if requirement.name == "torch")
    bounds = {spec.operator: spec.version for spec in torch.specifier}
    major, minor = bounds["<"].split(".")
    declared = (bounds[">="], f"{major}.{int(minor) - 1}")
    said = [
        (document.name, release)
        for document in DOCUMENTS
        for release in re.findall(r"[Tt]orch (\d\.\d+)(?: to |-)(\d\.\d+)", document.read_text(encoding="utf-8"))
    ]
    assert said
    assert {release for _, release in said} == {declared}, said


def test_the_readme_shows_the_real_answer_to_a_mistake():
    from shardwise.report.terminal import problems_text
    from shardwise.spec.problems import BadInput
    from shardwise.spec.reader import read_job

    text = "model: m\ndata: d.jsonl\nfsdp: full_shrad\nuse_lora: true\nlora_rank: 64\n\nlora_rnak: 4\n"
    with pytest.raises(BadInput) as caught:
        read_job(None, text=text)
    assert problems_text(caught.value) in (ROOT / "README.md").read_text()
