"""After the last step: exports, and the check of them in a fresh process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

import torch
import torch.distributed as dist

from shardwise.data.rows import Rows
from shardwise.report.terminal import bytes_text
from shardwise.spec.strict import Dtype
from shardwise.state.export import Exported, export_adapter, export_merged
from shardwise.state.probe import probe_logits
from shardwise.state.verify import Verification, verify_export
from shardwise.train.loop import Outcome
from shardwise.train.training import Training

PROBE_TOKENS = 64
"""Length of the row on which an export's logits are compared with the live model's."""


def finish(training: Training, outcome: Outcome, say: Callable[[str], None]) -> bool:
    """Export, check and report a finished run; every rank calls it. Returns whether the exports are right.

    Full fine-tuning leaves `export/model`; LoRA leaves `export/adapter` and `export/merged`.

    Raises:
        ExportError: nothing usable could be written.
        VerificationError: the fresh process could not answer.
    """
    probe = _probe_tokens(training)
    logits = probe_logits(training.model, probe)
    found: dict[str, Verification] = {}
    for exported in _exports(training):
        name = exported.path.name
        say(f"exported {exported.path}: {exported.tensors} tensors, {bytes_text(exported.bytes)}")
        found[name] = verify_export(
            exported,
            input_ids=probe,
            logits=logits,
            computed=training.plan.dtypes.param,
            base=training.source.folder,
            base_dtype=_stored(training),
            question=training.job.sample if name != "adapter" else None,
        )
        say(_verdict(name, found[name]))
    good = all(one.ok for one in found.values())
    if dist.get_rank() == 0:
        folder = training.folder
        (folder.export / "verification.json").write_text(
            json.dumps({name: asdict(one) for name, one in found.items()}, indent=1)
        )
        folder.set_status("finished" if good else "unverified", outcome.step)
    _say_answers(training, found, say)
    say(_last_line(outcome))
    return good


def _probe_tokens(training: Training) -> torch.Tensor:
    held_out = training.folder.data / "held_out.arrow"
    rows = Rows.open(held_out if held_out.is_file() else training.folder.data / "train.arrow")
    return torch.tensor([rows[0].input_ids[:PROBE_TOKENS]])


def _exports(training: Training) -> list[Exported]:
    folder, source = training.folder.export, training.source
    tokenizer = source.tokenizer()
    if not training.job.use_lora:
        return [export_merged(folder / "model", training.model, source=source, tokenizer=tokenizer)]
    return [
        export_adapter(folder / "adapter", training.model, source=source, tokenizer=tokenizer),
        export_merged(folder / "merged", training.model, source=source, tokenizer=tokenizer),
    ]


def _stored(training: Training) -> Dtype | None:
    stored = training.plan.dtypes.frozen_storage
    assert stored != "checkpoint", "a live model has a dtype"
    return stored


def _verdict(name: str, found: Verification) -> str:
    if not found.ok:
        return f"{name} is NOT what was trained: {found.reason}"
    return (
        f"opened {name} in a fresh process: logits equal the live model's within {found.max_difference:.1e} "
        f"(allowed {found.tolerance:.1e}), same next token at {found.greedy_agreement:.0%} of positions"
    )


def _say_answers(training: Training, found: dict[str, Verification], say: Callable[[str], None]) -> None:
    for one in found.values():
        if one.answer_after is not None:
            say(f"\nasked:  {training.job.sample}")
            say(f"before: {one.answer_before}")
            say(f"after:  {one.answer_after}\n")


def _last_line(outcome: Outcome) -> str:
    if outcome.last_loss is None:
        return f"finished at step {outcome.step}"
    if outcome.first_loss is None:
        return f"training loss: {outcome.last_loss:.2f}"
    return f"held-out loss: {outcome.last_loss:.2f} (before: {outcome.first_loss:.2f})"
