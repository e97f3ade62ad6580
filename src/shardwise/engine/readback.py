"""What the live model does, read back and compared with the plan."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.engine.activation_offload import activation_offload_of
from shardwise.engine.blocks import find_blocks
from shardwise.engine.checkpointing import checkpointing_of, planned_checkpointing
from shardwise.engine.compat import attention_of, is_compiled
from shardwise.engine.dtypes import TORCH_DTYPE
from shardwise.engine.expected import Expected
from shardwise.engine.loss_head import loss_head_of
from shardwise.engine.mesh import data_mesh
from shardwise.engine.names import unwrapped_name
from shardwise.engine.precision import is_rotary
from shardwise.engine.readback_units import check_units
from shardwise.spec.plan import Plan


class PlanNotHonoured(RuntimeError):
    """The live model differs from the plan; holds every difference."""

    def __init__(self, differences: list[str]) -> None:
        self.differences = differences
        super().__init__("the live model is not what the plan says:\n  " + "\n  ".join(differences))


def check_live_model(model: nn.Module, plan: Plan, mesh: DeviceMesh, expected: Expected) -> None:
    """Compare the live model with the plan: units and their policies, prefetch, reductions, placements, storage dtypes,
    blocks' checkpointing, offload and compilation, loss head, attention, buffers.

    Args:
        model: After `apply`.
        plan: What was to be applied.
        mesh: The whole mesh.
        expected: From `expect`, before `apply`.

    Raises:
        PlanNotHonoured: with every difference found.
    """
    differences = [
        *check_units(model, plan, expected.units, mesh.device_type),
        *_check_parameters(model, plan, mesh, expected),
        *_check_blocks(model, plan),
        *_check_attention(model, plan),
        *_check_buffers(model, plan),
    ]
    if differences:
        raise PlanNotHonoured(differences)


def _check_parameters(model: nn.Module, plan: Plan, mesh: DeviceMesh, expected: Expected) -> list[str]:
    over = data_mesh(mesh)
    differences = []
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            differences.append(f"{name}: not sharded, its gradient would never be reduced")
            continue
        placements = expected.placements.get(unwrapped_name(name), ())
        planned_mesh = over if len(placements) == over.ndim else mesh
        if parameter.device_mesh != planned_mesh or tuple(parameter.placements) != placements:
            differences.append(
                f"{name}: placed {parameter.placements} on {parameter.device_mesh}, "
                f"planned {placements} on {planned_mesh}"
            )
        place = "cpu" if plan.offload.parameters else mesh.device_type
        if parameter.device.type != place:
            differences.append(f"{name}: lives on {parameter.device.type}, planned {place}")
        role = plan.dtypes.trained_storage if parameter.requires_grad else plan.dtypes.frozen_storage
        wanted = None if role is None or role == "checkpoint" else TORCH_DTYPE[role]
        if parameter.dtype != wanted:
            kind = "trained" if parameter.requires_grad else "frozen"
            differences.append(f"{name}: {kind}, stored in {parameter.dtype}, planned {wanted}")
    return differences


def _check_blocks(model: nn.Module, plan: Plan) -> Iterator[str]:
    for index, block in enumerate(find_blocks(model).modules):
        offloads = activation_offload_of(block) is not None
        wanted: list[tuple[str, object, object]] = [
            ("checkpointing", checkpointing_of(block), planned_checkpointing(plan.activation_checkpointing, index)),
            ("activation offload", offloads, plan.offload.activations),
            ("compiled", is_compiled(block), plan.compile),
        ]
        yield from (f"block {index}: {what} is {got}, planned {want}" for what, got, want in wanted if got != want)
    if loss_head_of(model) != plan.loss_head:
        yield f"loss head is {loss_head_of(model)}, planned {plan.loss_head}"


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
