"""Is an export what the live model was? Asked in a fresh process that knows nothing but the files.

    python -m shardwise.state.verify FOLDER --expect FILE [--base FOLDER] [--question TEXT]

loads FOLDER with transformers, or with PEFT on the base model, computes the logits of the tokens in FILE and compares
them with the live model's, which are in FILE too. Prints one line of JSON (the fields of `Verification`). Exit code 0:
equal within the tolerance, 1: not, 2: bad arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardwise.engine.dtypes import DTYPE_NAME, TORCH_DTYPE
from shardwise.engine.source import open_folder
from shardwise.spec.strict import Dtype
from shardwise.state import together
from shardwise.state.export import Exported
from shardwise.state.probe import generate_answer, probe_logits

_TOLERANCE: dict[Dtype, float] = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}
"""Largest accepted difference of logits as a share of the largest logit, by the coarsest dtype on the way."""

_ADAPTER = "adapter_config.json"

_SET_BY_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class VerificationError(RuntimeError):
    """The fresh process could not answer; raised on every rank."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What a fresh process found."""

    ok: bool
    """The export is what the live model was."""
    reason: str
    """Why not; empty when it is."""
    max_difference: float
    """Largest absolute difference of a logit."""
    tolerance: float
    """Largest difference accepted."""
    greedy_agreement: float
    """Share of positions at which both choose the same next token."""
    answer_before: str | None
    """The base model's answer to the question; None when none was asked."""
    answer_after: str | None
    """The export's answer."""


def tolerance_for(exported: Exported, computed: Dtype, logits: torch.Tensor, base: Dtype | None = None) -> float:
    """Return the largest accepted difference between the live model's logits and the export's.

    1e-2 of the largest logit in fp16, 5e-2 in bf16; 1e-4 in fp32, times the largest logit when that is above 1. The
    coarser counts of the dtype that was computed in and of the one that weights are rounded to: a merged model's own;
    for an adapter with modules trained whole that of the `base`, to which PEFT rounds them as it loads them. (The files
    hold what was gathered, bit for bit, or the export would have failed: this bound covers rounding on the way and
    other kernels.)
    """
    dtypes = [computed]
    if not _is_adapter(exported.path):
        dtypes.append(DTYPE_NAME[exported.dtype])
    elif base is not None and json.loads((exported.path / _ADAPTER).read_text())["modules_to_save"]:
        dtypes.append(base)
    coarsest = max(dtypes, key=lambda dtype: _TOLERANCE[dtype])
    largest = float(logits.abs().max())
    return _TOLERANCE[coarsest] * (max(1.0, largest) if coarsest == "fp32" else largest)


def _is_adapter(folder: Path) -> bool:
    return (folder / _ADAPTER).is_file()


def verify_export(
    exported: Exported,
    *,
    input_ids: torch.Tensor,
    logits: torch.Tensor,
    computed: Dtype,
    base: Path | None = None,
    base_dtype: Dtype | None = None,
    question: str | None = None,
    threads: int | None = None,
    timeout: float = 3600,
) -> Verification:
    """Check an export in a fresh process started by rank 0; every rank calls it and gets the result.

    Args:
        exported: From `export_adapter` or `export_merged`.
        input_ids: Tokens [rows, length].
        logits: The live model's, from `probe_logits`.
        computed: Dtype of the live model's gathered weights; the fresh process casts to it too.
        base: Folder of the base model: needed for an adapter, and for `answer_before`.
        base_dtype: Dtype in which the live model stored the base; default: the base folder's own.
        question: Asked of base and export.
        threads: Of the fresh process; default: what the environment says, else all cores.
        timeout: Seconds.

    Raises:
        VerificationError: the fresh process crashed or took too long.
    """

    def ask() -> Verification:
        stored = base_dtype or (open_folder(base).dtype if base is not None else None)
        with tempfile.TemporaryDirectory(prefix="verify-") as scratch:
            expect = Path(scratch) / "expect.safetensors"
            save_file(
                {"input_ids": input_ids.cpu(), "logits": logits.float().cpu().contiguous()},
                expect,
                {
                    "tolerance": str(tolerance_for(exported, computed, logits, stored)),
                    "computed": computed,
                    "base_dtype": base_dtype or "",
                },
            )
            command = [sys.executable, "-m", "shardwise.state.verify", str(exported.path), "--expect", str(expect)]
            command += ["--base", str(base)] if base is not None else []
            command += ["--question", question] if question is not None else []
            return _run(command, _environment(threads), timeout)

    return together.attempt_on_rank0(f"verifying {exported.path}", ask, VerificationError)


def _environment(threads: int | None) -> dict[str, str]:
    """This environment without the rank's identity; CPU only, as the ranks hold the GPUs; nothing from the network."""
    env = {name: value for name, value in os.environ.items() if name not in _SET_BY_LAUNCHER}
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    elif "TORCHELASTIC_RUN_ID" in env and env.get("OMP_NUM_THREADS") == "1":
        # torchrun sets it for the ranks, which share the cores; the fresh process has them to itself.
        del env["OMP_NUM_THREADS"]
    return env | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def _run(command: list[str], env: dict[str, str], timeout: float) -> Verification:
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    lines = done.stdout.strip().splitlines()
    try:
        return Verification(**json.loads(lines[-1]))
    except (IndexError, ValueError, TypeError) as error:
        told = " | ".join(done.stderr.strip().splitlines()[-3:])
        raise RuntimeError(f"the fresh process ended with exit code {done.returncode}: {told}") from error


def verify(folder: Path, expect: Path, base: Path | None, question: str | None) -> Verification:
    """Load an export and compare it with what a live model said; to be called in a process of its own.

    Args:
        folder: A transformers model folder or a PEFT adapter.
        expect: safetensors file with `input_ids`, `logits`, and in its metadata `tolerance`, `computed` and
            `base_dtype` (may be empty).
        base: Folder of the base model.
        question: Asked of base and export.
    """
    with safe_open(expect, framework="pt") as file:
        given = file.metadata()
        input_ids, wanted = file.get_tensor("input_ids"), file.get_tensor("logits")
    base_dtype = TORCH_DTYPE[given["base_dtype"]] if given["base_dtype"] else None
    computed = TORCH_DTYPE[given["computed"]]
    tokenizer = AutoTokenizer.from_pretrained(base or folder) if question else None
    before: str | None = None
    if _is_adapter(folder):
        model, problem = _load_adapter(folder, base, base_dtype)
        _compute_in(model, computed)
        if tokenizer is not None:
            with model.disable_adapter():
                before = generate_answer(model, tokenizer, question or "")
    else:
        if tokenizer is not None and base is not None:
            before = generate_answer(_compute_in(_load(base, base_dtype)[0], computed), tokenizer, question or "")
        model, problem = _load(folder, None)
        _compute_in(model, computed)
    return _compare(
        probe_logits(model, input_ids),
        wanted,
        tolerance=float(given["tolerance"]),
        problem=problem,
        answers=(before, generate_answer(model, tokenizer, question or "") if tokenizer is not None else None),
    )


def _compare(
    found: torch.Tensor,
    wanted: torch.Tensor,
    *,
    tolerance: float,
    problem: str,
    answers: tuple[str | None, str | None],
) -> Verification:
    difference = float((found - wanted).abs().max()) if found.shape == wanted.shape else float("inf")
    reason = problem
    if not reason and found.shape != wanted.shape:
        reason = f"logits have shape {list(found.shape)} instead of {list(wanted.shape)}"
    elif not reason and not difference <= tolerance:
        reason = f"logits differ by up to {difference:.3g}, more than {tolerance:.3g}"
    agreement = 0.0
    if found.shape == wanted.shape:
        agreement = float((found.argmax(-1) == wanted.argmax(-1)).float().mean())
    return Verification(
        ok=not reason,
        reason=reason,
        max_difference=difference,
        tolerance=tolerance,
        greedy_agreement=agreement,
        answer_before=answers[0],
        answer_after=answers[1],
    )


def _load(folder: Path, dtype: torch.dtype | None) -> tuple[Any, str]:
    """Return a model and what of it did not come from its files."""
    model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto", output_loading_info=True)
    told = [f"{kind}: {', '.join(sorted(map(str, names))[:3])}" for kind, names in loading.items() if names]
    return model, "; ".join(told)


def _compute_in(model: Any, dtype: torch.dtype) -> Any:
    """Cast the weights as the live model's units do when they gather them; buffers stay.

    fp16 weights are computed on in fp32, as CPUs are slow at fp16.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
        if dtype is torch.float16:
            parameter.data = parameter.data.float()
    return model


def _load_adapter(folder: Path, base: Path | None, base_dtype: torch.dtype | None) -> tuple[Any, str]:
    if base is None:
        raise ValueError("an adapter needs --base")
    plain, _ = _load(base, base_dtype)
    model = PeftModel.from_pretrained(plain, folder)
    stored = load_file(folder / "adapter_model.safetensors")
    live = get_peft_model_state_dict(model, save_embedding_layers=False)
    if odd := sorted(stored.keys() ^ live.keys()):
        return model, f"adapter tensors that PEFT did not load or did not find: {', '.join(odd[:3])}"
    changed = [name for name in stored if not _loaded(name, stored[name], live[name])]
    return model, f"PEFT loaded other values: {', '.join(changed[:3])}" if changed else ""


def _loaded(name: str, stored: torch.Tensor, live: torch.Tensor) -> bool:
    """Whether PEFT loaded a tensor as it is stored; it rounds those of modules trained whole to the base's dtype."""
    if "lora_" in name:
        return torch.equal(stored, live.to(stored.dtype))
    return torch.equal(stored.to(live.dtype), live)


def main(arguments: list[str] | None = None) -> int:
    """Run the check of the command line."""
    parser = argparse.ArgumentParser(prog="python -m shardwise.state.verify", description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="the export")
    parser.add_argument("--expect", type=Path, required=True, help="tokens and the live model's logits")
    parser.add_argument("--base", type=Path, help="folder of the base model")
    parser.add_argument("--question", help="asked of base and export")
    given = parser.parse_args(arguments)
    found = verify(given.folder, given.expect, given.base, given.question)
    print(json.dumps(asdict(found)))
    return 0 if found.ok else 1


if __name__ == "__main__":
    sys.exit(main())
