"""What a model answers: logits of given tokens, and a greedy reply to a question."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

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

    Every next token is the likeliest one; sampling settings and penalties of the model's `generation_config` do not
    count. On a sharded model every rank calls it. (`generate` cannot be used there: PEFT's goes past the root unit.)
    """
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": question}]
        asked = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        asked = tokenizer(question, return_tensors="pt")
    tokens = asked["input_ids"].to(next(model.parameters()).device)
    ends = _end_tokens(model, tokenizer)
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    reply: list[int] = []
    cache = None
    with _evaluating(model):
        while len(reply) < max_new_tokens:
            output = model(input_ids=tokens, past_key_values=cache, use_cache=True)
            token = int(output.logits[0, -1].argmax())
            # Ranks must stop at the same token, whatever the last bits of their logits are.
            reply.append(together.gather(token)[0] if sharded else token)
            if reply[-1] in ends:
                break
            cache = output.past_key_values
            tokens = tokens.new_tensor([reply[-1:]])
    text: str = tokenizer.decode(reply, skip_special_tokens=True)
    return text.strip()


def _end_tokens(model: Any, tokenizer: Any) -> set[int]:
    configured = model.generation_config.eos_token_id
    ends = configured if isinstance(configured, list) else [configured]
    return {end for end in [*ends, tokenizer.eos_token_id] if end is not None}
