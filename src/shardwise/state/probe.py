"""What a model answers: logits of given tokens, and a greedy reply to a question."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import GenerationConfig

from shardwise.state import together
from shardwise.state.live import reshard


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards modes and shards are as they were."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
        reshard(model)


def probe_logits(model: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [rows, length, vocab] of `input_ids` [rows, length], fp32 on the CPU, without dropout.

    On a sharded model every rank calls it with the same tokens and gets the same logits. Rows are whole: no padding.
    """
    device = next(model.parameters()).device
    with _evaluating(model):
        logits: torch.Tensor = model(input_ids=input_ids.to(device), use_cache=False).logits
    return logits.float().cpu()


def generate_answer(model: Any, tokenizer: Any, question: str, max_new_tokens: int = 64) -> str:
    """Return the model's greedy reply to a question, asked with the tokenizer's chat template when it has one.

    Sampling settings and penalties of the model's `generation_config` do not count. On a sharded model every rank calls
    it, and it is slow: nothing is cached between tokens.
    """
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": question}]
        asked = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        asked = tokenizer(question, return_tensors="pt")
    tokens = asked["input_ids"].to(next(model.parameters()).device)
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    with _evaluating(model):
        continued = (_greedy if sharded else _generate)(model, tokens, _end_tokens(model, tokenizer), max_new_tokens)
    reply: str = tokenizer.decode(continued[0, tokens.shape[1] :], skip_special_tokens=True)
    return reply.strip()


def _greedy(model: Any, tokens: torch.Tensor, ends: list[int], max_new_tokens: int) -> torch.Tensor:
    """`generate` for sharded models; PEFT's own goes past the root unit, whose weights then stay shards."""
    for _ in range(max_new_tokens):
        token = int(model(input_ids=tokens, use_cache=False).logits[0, -1].argmax())
        # Ranks must stop at the same token, whatever the last bits of their logits are.
        token = together.gather(token)[0]
        tokens = torch.cat([tokens, tokens.new_tensor([[token]])], dim=1)
        if token in ends:
            break
    return tokens


def _generate(model: Any, tokens: torch.Tensor, ends: list[int], max_new_tokens: int) -> torch.Tensor:
    plainly = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
    )
    continued: torch.Tensor = model.generate(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), generation_config=plainly
    )
    return continued


def _end_tokens(model: Any, tokenizer: Any) -> list[int]:
    configured = model.generation_config.eos_token_id
    ends = configured if isinstance(configured, list) else [configured]
    return sorted({end for end in [*ends, tokenizer.eos_token_id] if end is not None})
