"""How a batch becomes its loss: from whole logits, from some tokens' logits at a time, or by a fused kernel.

Everything around the head stays the model's own code. During `token_loss` two methods are replaced on the live model,
and put back after it: the causal LM's `forward`, and that of its head. The head gets the decoder's output, keeps the
positions that are trained, and returns their loss in one call, so that FSDP2's hooks on the unit that owns the head
fire once. For each chunk it runs the causal LM's own `forward` again, over a stand-in for the decoder that returns the
chunk: whatever the model does to its logits (soft caps, scales) happens to the chunk's.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from shardwise.engine.causal_parts import CausalParts, Project, find_parts, replaced_forward
from shardwise.engine.loss import IGNORED, summed_cross_entropy, token_loss_sum
from shardwise.spec.plan import Plan
from shardwise.spec.plan_rules import of_loss_head
from shardwise.spec.problems import BadInput, Problem

_INSTALLED = "shardwise_loss_head"
"""Attribute of a model that holds its LossHead."""


class LabelledTokens(Protocol):
    """What `token_loss` reads of a batch; int64 tensors [rows, length]."""

    @property
    def input_ids(self) -> torch.Tensor:
        """Token ids."""

    @property
    def attention_mask(self) -> torch.Tensor:
        """1 for tokens, 0 for padding."""

    @property
    def labels(self) -> torch.Tensor:
        """Aligned with `input_ids`; -100 where nothing is learnt."""


@dataclass(frozen=True, kw_only=True)
class LossHead:
    """A loss head that does not make whole logits, installed on a model."""

    kind: str
    """`chunked` or `fused`."""
    chunk: int
    """Tokens whose logits exist at once (`chunked`)."""
    parts: CausalParts
    """The model."""
    softcap: float | None
    """Soft cap of the logits (`fused`)."""


def check_loss_head(plan: Plan, device_type: str) -> None:
    """Refuse a loss head that cannot run on `device_type`; needs no model and no ranks.

    Raises:
        BadInput: `fused` without a GPU or without its package; logits that should leave the model in low precision.
    """
    problems = tuple(of_loss_head(plan, device_type))
    if problems:
        raise BadInput(problems)
    if plan.loss_head == "fused" and importlib.util.find_spec("liger_kernel") is None:
        reason = "needs the package liger-kernel, which is not installed"
        raise BadInput(Problem(field="loss_head", value="fused", reason=reason, fix="pip install 'shardwise[liger]'"))


def install_loss_head(model: nn.Module, plan: Plan) -> None:
    """Prepare `model` for the plan's loss head; called before anything is wrapped or sharded.

    Raises:
        BadInput: a model whose head or logits the loss head cannot take over.
    """
    kind = plan.loss_head
    if kind == "eager":
        return
    parts = find_parts(model)
    if parts is None:
        reason = f"{type(model).__name__} has no decoder and output projection side by side"
        raise _refused(kind, reason, "eager")
    if kind == "fused" and type(parts.head) is not nn.Linear:
        reason = f"the output projection is a {type(parts.head).__name__}, not a plain linear layer"
        raise _refused(kind, reason, "chunked")
    softcap = _check_logits(kind, parts)
    setattr(model, _INSTALLED, LossHead(kind=kind, chunk=plan.loss_chunk, parts=parts, softcap=softcap))


def loss_head_of(model: nn.Module) -> str:
    """Return the loss head that `token_loss` uses on this model: `eager`, `chunked` or `fused`."""
    installed: LossHead | None = getattr(model, _INSTALLED, None)
    return "eager" if installed is None else installed.kind


def token_loss(model: nn.Module, batch: LabelledTokens) -> torch.Tensor:
    """Return the summed token loss of a batch, by the model's loss head.

    A scalar in fp32: the sum over positions with a label of the cross-entropy of predicting it from the position
    before; 0 with zero gradients when there is none. Every rank runs the same collectives whatever its labels are.
    """
    installed: LossHead | None = getattr(model, _INSTALLED, None)
    inputs: dict[str, Any] = {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "use_cache": False,
    }
    if installed is None:
        return token_loss_sum(model(**inputs).logits, batch.labels)
    with _loss_in_place_of_logits(installed, batch.labels):
        loss: torch.Tensor = model(**inputs).logits
    return loss


def _check_logits(kind: str, parts: CausalParts) -> float | None:
    """Try what the model does between decoder and logits; returns the soft cap of a `fused` head.

    Raises:
        BadInput: when it cannot run without the decoder, or does something to the logits that the kernel does not know.
    """
    name = parts.model_class.__name__
    probe = torch.linspace(-50, 50, 7).view(1, 1, 7)
    try:
        logits = parts.logits(probe, lambda hidden: hidden)
    except Exception as error:
        raise _refused(kind, f"{name} needs more than its decoder's output to make logits", "eager") from error
    if kind == "chunked" or torch.equal(logits, probe):
        return None
    cap = getattr(cast(Any, parts.model).config, "final_logit_softcapping", None)
    if cap is not None and torch.allclose(logits, cap * torch.tanh(probe / cap)):
        return float(cap)
    raise _refused(kind, f"{name} changes its logits in a way that the kernel does not know", "chunked")


def _refused(kind: str, reason: str, instead: str) -> BadInput:
    allowed = "eager" if instead == "eager" else "eager, chunked"
    return BadInput(
        Problem(field="loss_head", value=kind, reason=reason, allowed=allowed, fix=f"use 'loss_head: {instead}'")
    )


@contextmanager
def _loss_in_place_of_logits(installed: LossHead, labels: torch.Tensor) -> Iterator[None]:
    """Let the causal LM return the loss of `labels` as its logits, from one call of its head."""
    parts, head = installed.parts, installed.parts.head
    loss_of = fused_loss if installed.kind == "fused" else _chunked_loss
    project = head.forward

    def head_forward(hidden: torch.Tensor) -> torch.Tensor:
        if not isinstance(hidden, DTensor):
            return loss_of(installed, project, *_trained(hidden, labels))
        mesh = hidden.device_mesh
        loss = loss_of(installed, _gathered(project, mesh), *_trained(hidden.to_local(), labels))
        return DTensor.from_local(loss, mesh, [Replicate()])

    def causal_lm_forward(*args: object, **kwargs: object) -> Any:
        hidden: list[torch.Tensor] = []
        loss: list[torch.Tensor] = []

        def decode(*args: object, **kwargs: object) -> Any:
            decoded = parts.decoder(*args, **kwargs)
            hidden.append(decoded[0])
            return decoded

        def take_loss(_: torch.Tensor) -> torch.Tensor:
            loss.append(head(hidden[0]))
            return hidden[0].new_zeros((1, 1, 1))

        output = parts.forward(decode, take_loss, *args, **kwargs)
        output.logits = loss[0]
        return output

    with replaced_forward(parts.model, causal_lm_forward), replaced_forward(head, head_forward):
        yield


def _gathered(project: Project, mesh: DeviceMesh) -> Project:
    """Return a head split by tensor parallelism as one for plain tensors: hidden states in, whole logits out."""

    def whole(hidden: torch.Tensor) -> torch.Tensor:
        split = cast(DTensor, project(DTensor.from_local(hidden, mesh, [Replicate()])))
        return split.redistribute(placements=[Replicate()]).to_local()

    return whole


def _trained(hidden: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden states [tokens, width] from which a label is predicted, and those labels.

    Without any, one position with the label -100: its loss is 0, and no kernel is given zero rows.
    """
    nothing = labels.new_full((labels.shape[0], 1), IGNORED)
    targets = torch.cat([labels[:, 1:], nothing], dim=1).flatten()
    chosen = (targets != IGNORED).nonzero().flatten()
    if chosen.numel() == 0:
        chosen = targets.new_zeros(1)
    return hidden.flatten(0, 1).index_select(0, chosen), targets.index_select(0, chosen)


def _chunked_loss(installed: LossHead, project: Project, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum of token losses whose logits exist for one chunk at a time, in forward and in backward."""

    def loss_of(some: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return summed_cross_entropy(installed.parts.logits(some.unsqueeze(0), project)[0], labels)

    loss = torch.zeros((), device=hidden.device)
    for some, labels in zip(torch.split(hidden, installed.chunk), torch.split(targets, installed.chunk), strict=True):
        loss = loss + cast(torch.Tensor, checkpoint(loss_of, some, labels, use_reentrant=False))
    return loss


def fused_loss(installed: LossHead, project: Project, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the same by Liger's kernel, which computes the gradients of head and hidden states in forward."""
    head = cast(nn.Linear, installed.parts.head)
    kernel = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORED, reduction="sum", softcap=installed.softcap
    )
    loss: torch.Tensor = kernel(head.weight, hidden, targets, head.bias)
    return loss
