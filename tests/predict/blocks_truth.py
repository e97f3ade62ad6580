"""What a small transformers model really allocates, part by part, by torch.profiler's events of the CPU allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.engine.adapters import add_adapters
from shardwise.engine.blocks import find_blocks
from shardwise.engine.checkpointing import wrap_blocks
from shardwise.engine.loss_head import install_loss_head, token_loss
from shardwise.engine.mesh import build_mesh, tensor_mesh
from shardwise.engine.tensor_parallel import parallelize
from shardwise.spec.method import Lora
from shardwise.spec.plan import Plan

KERNELS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::mul",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
)
"""Operations whose own scratch memory on a CPU is not the computation's: packed operands, operands in another dtype."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Batch:
    """Rows of equal length in which every token is trained; int64 [rows, length]."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor


def build(config: dict[str, Any], plan: Plan, lora: Lora | None) -> nn.Module:
    """A model in the compute dtype, with adapters, loss head and checkpointing; no sharding."""
    given = dict(config)
    with torch.random.fork_rng():
        made = AutoConfig.for_model(given.pop("model_type"), **given)
        model: nn.Module = AutoModelForCausalLM.from_config(made, attn_implementation=plan.attention)
        if lora is not None:
            model = add_adapters(model, lora)
    model.to(DTYPES[plan.dtypes.param]).train()
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            owner, _, last = name.rpartition(".")
            real = nn.Parameter(torch.zeros_like(parameter, device="cpu"), requires_grad=parameter.requires_grad)
            setattr(model.get_submodule(owner), last, real)
    install_loss_head(model, plan)
    wrap_blocks(find_blocks(model).modules, plan.activation_checkpointing)
    if plan.loss_head == "eager":
        _cast_logits(model, DTYPES[plan.dtypes.output])
    return model


def build_split(config: dict[str, Any], plan: Plan, lora: Lora | None) -> nn.Module:
    """The same model, this rank's part of it on the plan's tensor axis; in a process group of the plan's world."""
    given = dict(config)
    made = AutoConfig.for_model(given.pop("model_type"), **given)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(made, attn_implementation=plan.attention)
    if lora is not None:
        model = add_adapters(model, lora, tensor=plan.mesh.tensor)
    model.to(DTYPES[plan.dtypes.param]).train()
    install_loss_head(model, plan)
    across = tensor_mesh(build_mesh(plan.mesh, "cpu"))
    assert across is not None
    parallelize(model, across, sequence_parallel=plan.mesh.sequence_parallel)
    wrap_blocks(find_blocks(model).modules, plan.activation_checkpointing)
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.zero_()
    if plan.loss_head == "eager":
        _cast_logits(model, DTYPES[plan.dtypes.output])
    return model


def _cast_logits(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast what leaves the model, as the root unit of FSDP2 does."""

    def cast(_: nn.Module, __: object, output: Any) -> Any:
        return type(output)(logits=output.logits.to(dtype))

    model.register_forward_hook(cast)


def measure(model: nn.Module, rows: int, length: int, vocab: int) -> dict[str, int]:
    """Return the highest level of every part of one step, in bytes above the model and its batch.

    Parts are named `embedding`, `block 0`, ..., `head`, then the same with ` backward`; `loss` is the level between.
    """
    ids = torch.randint(vocab, (rows, length))
    batch = Batch(ids, torch.ones_like(ids), ids.clone())
    blocks = find_blocks(model).modules
    for index, block in enumerate(blocks):
        block.register_forward_pre_hook(partial(_enter, index), with_kwargs=True)
        block.register_forward_hook(partial(_leave, index, len(blocks)))

    def step() -> None:
        with record_function("PART embedding"):
            pass
        loss = token_loss(model, batch)
        with record_function("PART loss"):
            pass
        with record_function("PART head backward"):
            pass
        loss.backward()  # type: ignore[no-untyped-call]

    step()
    for parameter in model.parameters():
        parameter.grad = None
    return _levels(step)


def measure_evaluation(model: nn.Module, rows: int, length: int, vocab: int) -> dict[str, int]:
    """Return the highest level of every part of a forward without gradients."""
    ids = torch.randint(vocab, (rows, length))
    batch = Batch(ids, torch.ones_like(ids), ids.clone())
    blocks = find_blocks(model).modules
    for index, block in enumerate(blocks):
        block.register_forward_pre_hook(partial(_enter, index), with_kwargs=True)
        block.register_forward_hook(partial(_leave, index, len(blocks)))
    model.eval()

    @torch.no_grad()
    def forward() -> None:
        with record_function("PART embedding"):
            pass
        token_loss(model, batch)

    forward()
    return _levels(forward)


def _mark(name: str, *_: object) -> None:
    with record_function(f"PART {name}"):
        pass


def _enter(index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _mark(f"block {index}")
    given: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    if given.requires_grad:
        after = "embedding backward" if index == 0 else f"block {index - 1} backward"
        given.register_hook(partial(_mark, after))


def _leave(index: int, count: int, _: nn.Module, __: object, output: Any) -> None:
    made: torch.Tensor = output[0] if isinstance(output, tuple) else output
    if index == count - 1:
        _mark("head")
        if made.requires_grad:
            made.register_hook(partial(_mark, f"block {index} backward"))


def peak_of(step: Callable[[], None]) -> int:
    """Return the highest level while `step` runs, in bytes above what was there before."""
    step()
    return max(_levels(step).values())


def _levels(step: Callable[[], None]) -> dict[str, int]:
    gc.disable()  # garbage of earlier steps would be freed in this one
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            step()
    finally:
        gc.enable()
    part, now = "", 0
    peaks: dict[str, int] = {}
    for name, size in _without_scratch(seen):
        if name.startswith("PART "):
            part = name.removeprefix("PART ")
        elif name == "[memory]":
            now += size
        else:
            continue
        peaks[part] = max(peaks.get(part, now), now)
    return peaks


def _without_scratch(seen: Any) -> list[tuple[str, int]]:
    """Return (name, bytes) of all events in order, without what kernels allocate and free themselves."""
    events = [
        (event.start_ns(), event.duration_ns(), event.name(), event.nbytes())
        for event in seen.profiler.kineto_results.events()
    ]
    events.sort(key=lambda event: event[0])
    made: list[tuple[str, int]] = []
    inside: list[tuple[str, int]] = []
    end = -1
    for start, duration, name, size in events:
        if start > end and inside:
            made += _unpaired(inside)
            inside = []
        if start > end and name.removesuffix("_backward") in KERNELS:
            end = start + duration
        (inside if start <= end else made).append((name, size))
    return made + _unpaired(inside)


def _unpaired(events: list[tuple[str, int]]) -> list[tuple[str, int]]:
    kept: list[tuple[str, int]] = []
    for name, size in events:
        opened = next((i for i in range(len(kept) - 1, -1, -1) if kept[i] == (name, -size)), None)
        if name == "[memory]" and size < 0 and opened is not None:
            del kept[opened]
        else:
            kept.append((name, size))
    return kept
