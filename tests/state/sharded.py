"""Small sharded models for the tests of this room: transformers + PEFT + `fully_shard`, and steps on them."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM


def build(
    folder: Path,
    *,
    lora: bool = False,
    wrapped: bool = False,
    reshard: bool | None = True,
    rank_of_lora: int = 4,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    replicate: bool = False,
):
    """Return a sharded model in training mode; LoRA matrices are random, so that they change the logits."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if lora:
        config = LoraConfig(
            r=rank_of_lora, lora_alpha=8, lora_dropout=dropout, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model = get_peft_model(model, config)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    blocks = model.get_decoder().layers
    if wrapped:
        for index, block in enumerate(blocks):
            blocks[index] = checkpoint_wrapper(block)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if replicate:
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=None if reshard else False)
    return model.train()


def adamw(model, **options):
    """Return AdamW in two groups, foreach, as the engine makes it."""
    options = {"foreach": not options.get("fused"), **options}
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1}]
    if others := [p for p in trained if p.ndim < 2]:
        groups.append({"params": others, "weight_decay": 0.0})
    return torch.optim.AdamW(groups, lr=1e-2, **options)


def step(model, optimizer, index: int, rank: int, world: int) -> float:
    """Take optimizer step `index` (4 rows in all, split over the ranks); the rate falls, as a schedule would do it."""
    rows = torch.randint(0, 101, (4, 12), generator=torch.Generator().manual_seed(100 + index))
    mine = rows[rank::world]
    optimizer.zero_grad()
    loss = model(input_ids=mine, labels=mine).loss
    loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 / (1 + index)
    optimizer.step()
    return loss.item()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the whole tensor."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def everything(model, optimizer) -> dict[str, torch.Tensor]:
    """Return all weights and optimizer states, whole, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "")
        found[name] = full(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}/{key}"] = full(value)
    return found


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Assert that names and bits are equal."""
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, different[:5]
