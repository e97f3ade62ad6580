"""Held-out loss is the mean over the held-out tokens, and looking at it changes nothing."""

from __future__ import annotations

import pytest
import torch

from engine.training import one_process_model
from harness.ranks import run_ranks
from harness.runs import make_run, metrics, train
from shardwise.data.rows import Rows
from shardwise.engine.loss import token_loss_sum


def _one_process(prepared):
    model = one_process_model(prepared.preview.job).eval()
    total, count = 0.0, 0
    for row in Rows.open(prepared.folder.data / "held_out.arrow"):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row.input_ids])).logits
        total += token_loss_sum(logits, torch.tensor([row.labels])).item()
        count += row.trained_tokens
    return total / count


@pytest.mark.parametrize("world", [1, 2, 3])
def test_it_is_the_mean_over_tokens_whatever_the_ranks(tiny, tmp_path, world):
    """Rows that do not divide over ranks, one row at a time in the reference: no padding, no batch."""
    prepared = make_run(tmp_path, tiny("llama"), world=world, steps=1, global_batch=2 * world)
    results = run_ranks(train, world, prepared)
    assert {r["first_loss"] for r in results} == {results[0]["first_loss"]}
    assert results[0]["first_loss"] == pytest.approx(_one_process(prepared), abs=2e-6)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_evaluating_after_every_step_changes_no_weight(tiny, tmp_path, strategy):
    """A unit that stays gathered after an evaluation would train on with old weights."""
    seen = []
    for name, every in (("never", 0), ("always", 1)):
        (tmp_path / name).mkdir()
        prepared = make_run(
            tmp_path / name,
            tiny("llama"),
            fsdp={"strategy": strategy},
            lora_dropout=0.0,
            steps=4,
            log={"evaluate_every": every, "tensorboard": False},
        )
        seen.append(run_ranks(train, 2, prepared)[0])
    for name, weight in seen[0]["weights"].items():
        assert torch.equal(weight, seen[1]["weights"][name]), name
    assert seen[0]["last_loss"] == seen[1]["last_loss"]
    losses = [line["held_out_loss"] for line in metrics(prepared) if "held_out_loss" in line]
    assert len(losses) == 5
    assert len(set(losses)) == 5, "a loss that does not move was computed from old weights"
