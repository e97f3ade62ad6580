"""What no plan can be, whatever the model and the machine: asked by the planner, and again before ranks start."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.spec.plan import Plan
from shardwise.spec.problems import Problem


def broken_rules(plan: Plan, device_type: str) -> Iterator[Problem]:
    """Yield what of a plan cannot hold together on `cuda` or `cpu` devices, with the remedy.

    What a model or this machine lacks (sizes, packages, kernels, releases) is not asked here.
    """
    yield from of_attention(plan)
    yield from of_loss_head(plan, device_type)
    yield from of_optimizer(plan)
    yield from _of_compile(plan)


def of_attention(plan: Plan) -> Iterator[Problem]:
    """Yield what is wrong with the attention implementation."""
    if plan.attention == "flash_attention_2" and plan.dtypes.param == "fp32":
        reason = "its kernels take bf16 and fp16 only, and weights are computed with in fp32"
        fix = "set mixed_precision: bf16, or attention: sdpa"
        yield Problem(field="model.attention", value=plan.attention, reason=reason, fix=fix)


def of_loss_head(plan: Plan, device_type: str) -> Iterator[Problem]:
    """Yield what is wrong with the loss head."""
    if plan.loss_head == "eager":
        return
    if plan.dtypes.output != "fp32":
        reason = f"loss_head {plan.loss_head} returns a loss, not logits, and a loss needs fp32"
        yield Problem(field="mixed_precision.output_dtype", value=plan.dtypes.output, reason=reason, allowed="fp32")
    if plan.loss_head == "fused":
        reason = ""
        if device_type != "cuda":
            reason = f"its kernel runs on GPUs only, and this is {device_type}"
        elif plan.mesh.tensor > 1:
            reason = "its kernel needs the whole head, and mesh.tensor splits it"
        if reason:
            fix = "use 'loss_head: chunked'"
            yield Problem(field="loss_head", value="fused", reason=reason, allowed="eager, chunked", fix=fix)


def of_optimizer(plan: Plan) -> Iterator[Problem]:
    """Yield what is wrong with the optimizer."""
    if plan.optimizer != "adamw_8bit":
        return
    if plan.offload.optimizer and not plan.offload.parameters:
        reason = "states of adamw_8bit stay on the device: torchao updates them in place"
        yield Problem(field="offload.optimizer", value=True, reason=reason, fix="remove it, or set optimizer: adamw")
    for field, dtype in (
        ("mixed_precision.storage_dtype", plan.dtypes.trained_storage),
        ("optimizer_state_dtype", plan.dtypes.optimizer_state),
    ):
        if dtype != "fp32":
            reason = "does not go with adamw_8bit: torchao's update of sharded weights works in fp32 only"
            fix = "remove it, or set optimizer: adamw"
            yield Problem(field=field, value=dtype, reason=reason, allowed="fp32", fix=fix)


def _of_compile(plan: Plan) -> Iterator[Problem]:
    if plan.compile and plan.mesh.tensor > 1:
        reason = "torch.compile cannot trace the layers that tensor parallelism splits"
        yield Problem(field="compile", value=True, reason=reason, fix="set compile: false, or remove mesh.tensor")
