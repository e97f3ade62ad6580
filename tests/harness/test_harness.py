"""The harness itself: results, failures, deaths, hangs, tiny checkpoints."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.ranks import run_ranks


@pytest.mark.parametrize("world", [1, 2, 4])
def test_results_come_back_by_rank(world):
    def body(rank, world, offset):
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
        assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(rank)
        assert os.environ["WORLD_SIZE"] == str(world) == str(dist.get_world_size())
        return rank + offset, total

    results = run_ranks(body, world, 10)
    assert [index for index, _ in results] == [10 + rank for rank in range(world)]
    assert all(total.item() == sum(range(world)) for _, total in results)


def test_large_results_do_not_block():
    results = run_ranks(lambda rank, world: torch.full((1 << 20,), float(rank)), 2)
    assert [result.sum().item() for result in results] == [0.0, float(1 << 20)]


def test_exception_on_one_rank_is_reported_while_the_other_waits_in_a_collective():
    def body(rank, world):
        if rank == 1:
            raise ValueError("the reason")
        dist.barrier()

    started = time.monotonic()
    with pytest.raises(AssertionError, match=r"rank 1 of 2 failed:\n(.|\n)*in body(.|\n)*ValueError: the reason"):
        run_ranks(body, 2)
    assert time.monotonic() - started < 8


def test_killed_rank_is_reported():
    def body(rank, world):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(AssertionError, match=r"rank 1 of 2 failed:\ndied without a result, exit code -9"):
        run_ranks(body, 2)


def test_hang_ends_at_the_limit_and_shows_where():
    def body(rank, world):
        if rank == 0:
            time.sleep(60)

    started = time.monotonic()
    with pytest.raises(AssertionError, match=r"rank 0 is still running:(.|\n)*in body"):
        run_ranks(body, 2, timeout=1)
    assert time.monotonic() - started < 8


def test_what_cannot_be_pickled_is_a_failure_of_its_rank():
    with pytest.raises(AssertionError, match="rank 0 of 1 failed"):
        run_ranks(lambda rank, world: lambda: None, 1)


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("qwen2", False)])
def test_tiny_checkpoint_loads_and_talks(tiny, family, tied):
    folder = tiny(family, tied=tied)
    assert tiny(family, tied=tied) == folder
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == 101 > len(tokenizer)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    text = "What is the name of the 2 things?\n- It's the first, the second: OK."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    rows = [{"role": "user", "content": "the name"}, {"role": "assistant", "content": "is it"}]
    ids = tokenizer.apply_chat_template(rows, return_dict=True, return_assistant_tokens_mask=True)
    marked = [token for token, mark in zip(ids["input_ids"], ids["assistant_masks"], strict=True) if mark]
    assert tokenizer.decode(marked) == "is it<|im_end|>"
    assert tokenizer.unk_token_id not in ids["input_ids"]
    assert model(torch.tensor([ids["input_ids"]])).logits.shape[-1] == 101


def test_same_seed_same_weights(tmp_path: Path, tiny):
    from harness.models import tiny_checkpoint

    other = tiny_checkpoint(tmp_path / "again", "llama")
    assert (other / "model.safetensors").read_bytes() == (tiny("llama") / "model.safetensors").read_bytes()
