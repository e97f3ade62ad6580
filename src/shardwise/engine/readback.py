"""What the live model does, read back and compared with the plan."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise.engine.apply import units
from shardwise.engine.blocks import find_blocks
from shardwise.engine.checkpointing import is_checkpointed
from shardwise.engine.compat import CheckpointWrapper, attention_of, unit_facts
from shardwise.engine.dtypes import TORCH_DTYPE
from shardwise.engine.precision import is_rotary
from shardwise.spec.plan import Plan


class PlanNotHonoured(RuntimeError):
    """The live model differs from the plan; holds every difference."""

    def __init__(self, differences: list[str]) -> None:
        self.differences = differences
        super().__init__("the live model is not what the plan says:\n  " + "\n  ".join(differences))


def check_live_model(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Compare units, policies, placements, storage dtypes, checkpointing, attention and buffers with the plan.

    Raises:
        PlanNotHonoured: with every difference found.
    """
    differences = [
        *_check_units(model, plan),
        *_check_parameters(model, plan, mesh),
        *_check_checkpointing(model, plan),
        *_check_attention(model, plan),
        *_check_buffers(model, plan),
    ]
    if differences:
        raise PlanNotHonoured(differences)


def _check_units(model: nn.Module, plan: Plan) -> list[str]:
    differences = []
    live = units(model)
    expected = len(find_blocks(model).modules) + 1
    if len(live) != expected:
        differences.append(f"units: {len(live)} live, {expected} planned (blocks and root)")
    names = {id(module): name or "root" for name, module in model.named_modules()}
    for unit in live:
        facts, name = unit_facts(unit), names[id(unit)]
        if facts is None:
            differences.append(f"unit {name}: holds no parameter")
            continue
        is_root = id(unit) == id(model)
        wanted: list[tuple[str, object, object]] = [
            ("gradients summed", facts.sums_gradients, True),
            ("param dtype", facts.param_dtype, TORCH_DTYPE[plan.dtypes.param]),
            ("reduce dtype", facts.reduce_dtype, TORCH_DTYPE[plan.dtypes.reduce]),
            ("output dtype", facts.output_dtype, TORCH_DTYPE[plan.dtypes.output] if is_root else None),
        ]
        if not is_root:
            wanted.append(("reshard_after_forward", facts.reshard_after_forward, plan.reshard_after_forward))
        differences += [f"unit {name}: {what} is {got}, planned {want}" for what, got, want in wanted if got != want]
    return differences


def _check_parameters(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> list[str]:
    placements = (Shard(0),) if plan.mesh.replicate == 1 else (Replicate(), Shard(0))
    differences = []
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            differences.append(f"{name}: not sharded, its gradient would never be reduced")
            continue
        if parameter.device_mesh != mesh or tuple(parameter.placements) != placements:
            differences.append(
                f"{name}: placed {parameter.placements} on {parameter.device_mesh}, planned {placements}"
            )
        role = plan.dtypes.trained_storage if parameter.requires_grad else plan.dtypes.frozen_storage
        wanted = None if role is None or role == "checkpoint" else TORCH_DTYPE[role]
        if parameter.dtype != wanted:
            kind = "trained" if parameter.requires_grad else "frozen"
            differences.append(f"{name}: {kind}, stored in {parameter.dtype}, planned {wanted}")
    return differences


def _check_checkpointing(model: nn.Module, plan: Plan) -> list[str]:
    return [
        f"block {index}: checkpointing {'on' if isinstance(block, CheckpointWrapper) else 'off'}, planned the opposite"
        for index, block in enumerate(find_blocks(model).modules)
        if isinstance(block, CheckpointWrapper) != is_checkpointed(plan.activation_checkpointing, index)
    ]


def _check_attention(model: nn.Module, plan: Plan) -> list[str]:
    live = attention_of(model)
    return [] if live == plan.attention else [f"attention is {live}, planned {plan.attention}"]


def _check_buffers(model: nn.Module, plan: Plan) -> list[str]:
    differences = []
    for module_name, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                differences.append(f"buffer {module_name}.{name}: still without memory")
            if not buffer.is_floating_point() or plan.dtypes.buffer is None:
                continue
            if is_rotary(module, name):
                if buffer.dtype != torch.float32:
                    differences.append(f"rotary table {module_name}.{name}: {buffer.dtype}, must stay torch.float32")
            elif buffer.dtype != TORCH_DTYPE[plan.dtypes.buffer]:
                differences.append(f"buffer {module_name}.{name}: {buffer.dtype}, planned {plan.dtypes.buffer}")
    return differences
