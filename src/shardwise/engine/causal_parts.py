"""A causal LM taken apart: its decoder, its head, and what its own forward does between and behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

Project = Callable[[torch.Tensor], torch.Tensor]
"""From hidden states [..., width] to what the head makes of them."""


@dataclass(frozen=True, kw_only=True)
class CausalParts:
    """A transformers causal LM and the names of its two direct parts."""

    model: nn.Module
    """The causal LM, without PEFT's model around it."""
    model_class: type[nn.Module]
    """Its class before sharding, which changes it."""
    decoder_name: str
    """Name of the decoder in it."""
    head_name: str
    """Name of the output projection in it."""

    @property
    def decoder(self) -> nn.Module:
        """The live decoder."""
        return cast(nn.Module, getattr(self.model, self.decoder_name))

    @property
    def head(self) -> nn.Module:
        """The live output projection."""
        return cast(nn.Module, getattr(self.model, self.head_name))

    def forward(self, decode: Callable[..., Any], project: Project, *args: object, **kwargs: object) -> Any:
        """Run the model's own forward with other calls in the place of decoder and head; hooks do not run."""
        view = object.__new__(self.model_class)
        view.__dict__.update(self.model.__dict__)
        other = {self.decoder_name: decode, self.head_name: _StandIn(self.head, project)}
        view.__dict__["_modules"] = {**view.__dict__["_modules"], **other}
        return cast(Any, self.model_class.forward)(view, *args, **kwargs)

    def logits(self, hidden: torch.Tensor, project: Project) -> torch.Tensor:
        """Return what the model makes of a decoder's output [rows, length, width] with `project` as its head."""
        logits: torch.Tensor = self.forward(lambda *_, **__: _Decoded(hidden), project, return_dict=True).logits
        return logits


def find_parts(model: nn.Module) -> CausalParts | None:
    """Take a transformers model, or a PEFT model of one, apart; None when decoder and head are not its direct parts."""
    causal_lm = cast(Any, model).get_base_model() if hasattr(model, "get_base_model") else model
    children = dict(causal_lm.named_children())
    decoder = str(getattr(causal_lm, "base_model_prefix", ""))
    output = getattr(causal_lm, "get_output_embeddings", lambda: None)()
    head = next((name for name, child in children.items() if child is output), None)
    if decoder not in children or head is None:
        return None
    return CausalParts(model=causal_lm, model_class=type(causal_lm), decoder_name=decoder, head_name=head)


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of one module object for a while; its hooks stay."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


class _Decoded:
    """Stands in for a decoder's output: the hidden states, and None for anything else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return self.last_hidden_state if index == 0 else None


class _StandIn:
    """Stands in for the head: another call, the same attributes (models ask for its weight's dtype)."""

    def __init__(self, head: nn.Module, call: Project) -> None:
        self.head, self.call = head, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.head, name)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.call(hidden)
