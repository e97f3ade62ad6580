"""LoRA adapters of a live sharded model, and the weights they turn into."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.distributed.tensor import DTensor


class NotMergeable(ValueError):
    """An adapter of a kind that is not W + scale * B @ A; it can be exported as an adapter."""


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """One adapter of one linear layer: its weight becomes W + scale * (B @ A)."""

    a: torch.Tensor
    """[rank, inputs], sharded or whole."""
    b: torch.Tensor
    """[outputs, rank], sharded or whole."""
    scale: float
    """`lora_alpha / rank`, or as PEFT computes it."""
    transposed: bool
    """The layer stores its weight as [inputs, outputs]."""

    def gathered(self) -> LowRank:
        """Return the same with whole matrices; every rank must call."""
        return LowRank(a=whole(self.a), b=whole(self.b), scale=self.scale, transposed=self.transposed)

    def added_to(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the merged weight in fp32; all matrices must be whole."""
        delta = (self.b.float() @ self.a.float()) * self.scale
        return weight.float() + (delta.T if self.transposed else delta)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a sharded one, on its device; every rank must call."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def adapters(model: nn.Module) -> dict[int, list[LowRank]]:
    """Return the active adapters by `id` of the weight that each changes; empty without LoRA.

    Raises:
        NotMergeable: the adapter is merged already, or has a bias, a magnitude (DoRA) or an embedding.
    """
    found: dict[int, list[LowRank]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        _check(name, module)
        weight = module.get_base_layer().weight
        found[id(weight)] = [
            LowRank(
                a=module.lora_A[adapter].weight,
                b=module.lora_B[adapter].weight,
                scale=float(module.scaling[adapter]),
                transposed=bool(getattr(module, "fan_in_fan_out", False)),
            )
            for adapter in module.active_adapters
            if adapter in module.lora_A
        ]
    return found


def _check(name: str, module: LoraLayer) -> None:
    if module.merged:
        raise NotMergeable(f"{name}: its adapter is merged into the sharded weight already")
    if len(module.lora_embedding_A):
        raise NotMergeable(f"{name}: merging an adapter of an embedding is not built")
    for adapter in module.active_adapters:
        if adapter not in module.lora_A:
            continue
        variant = module.lora_variant.get(adapter) is not None or module.lora_bias.get(adapter)
        if variant or module.lora_A[adapter].weight.ndim != 2:
            raise NotMergeable(f"{name}: merging DoRA, LoRA with bias or adapters of convolutions is not built")
