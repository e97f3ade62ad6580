"""LoRA adapters: injected before sharding, initialised the same on every layout."""

from __future__ import annotations

import hashlib
import math
import warnings

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwise.engine.compat import local_slices
from shardwise.engine.names import unwrapped_name
from shardwise.spec.job import Job
from shardwise.spec.problems import BadInput, Problem, did_you_mean


def _is_linear(module: nn.Module) -> bool:
    """Plain linear layers only: a subclass with its own forward (a router) may return something else than a tensor."""
    return type(module) in (nn.Linear, Conv1D)


def linear_suffixes(model: nn.Module) -> list[str]:
    """Return the last name parts of the model's plain linear layers, the head excepted, sorted.

    Experts stored as one tensor and routers are not among them.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    plain: set[str] = set()
    other: set[str] = set()
    for name, module in model.named_modules():
        if module is not head and isinstance(module, nn.Linear | Conv1D):
            (plain if _is_linear(module) else other).add(name.rpartition(".")[2])
    return sorted(plain - other)


def _check_targets(model: nn.Module, targets: list[str]) -> None:
    names = [name for name, module in model.named_modules() if _is_linear(module)]
    known = linear_suffixes(model)
    problems = [
        Problem(
            field="lora_targets",
            value=target,
            reason="matches no linear layer of this model",
            allowed=f"all_linear, or names among {', '.join(known)}",
            fix=did_you_mean(target, known),
        )
        for target in targets
        if not any(name == target or name.endswith("." + target) for name in names)
    ]
    if problems:
        raise BadInput(problems)


def add_adapters(model: nn.Module, job: Job) -> nn.Module:
    """Freeze `model` and add LoRA adapters in fp32; returns the PEFT model.

    Works on the meta device. Called before checkpointing and sharding: adapters added later would stay whole on every
    rank and never be reduced.

    Raises:
        BadInput: when a target matches no linear layer, or PEFT does not support it on this model.
    """
    if job.lora_targets == "all_linear":
        targets = linear_suffixes(model)
    else:
        _check_targets(model, job.lora_targets)
        targets = list(job.lora_targets)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=job.lora_rank,
        lora_alpha=lora_alpha(job),
        lora_dropout=job.lora_dropout,
        target_modules=targets,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # between PEFT and transformers, nothing a user can mend
            adapted: nn.Module = get_peft_model(model, config, low_cpu_mem_usage=True)
    except ValueError as error:
        reason = f"PEFT refuses these adapters: {str(error).strip().splitlines()[0]}"
        raise BadInput(Problem(field="lora_targets", value=targets, reason=reason)) from error
    return adapted


def lora_alpha(job: Job) -> int | float:
    """Numerator of the adapters' scale; whole numbers stay whole in the saved adapter."""
    alpha = 2 * job.lora_rank if job.lora_alpha is None else job.lora_alpha
    return int(alpha) if float(alpha).is_integer() else alpha


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int) -> int:
    """Initialise sharded adapters as PEFT does: A uniform (Kaiming, a = sqrt 5), B zero. Returns how many tensors.

    Each A is drawn whole from a generator of its own name and then cut, so that one seed gives one adapter whatever the
    number of ranks.
    """
    count = 0
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.zeros_(parameter.to_local() if hasattr(parameter, "to_local") else parameter)
        elif ".lora_A." in name:
            bound = math.sqrt(3.0) * math.sqrt(2.0 / (1 + 5)) / math.sqrt(parameter.shape[1])
            whole = torch.empty(parameter.shape, dtype=torch.float32)
            whole.uniform_(-bound, bound, generator=_generator(seed, unwrapped_name(name)))
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.copy_(whole[local_slices(parameter)])
        else:
            continue
        count += 1
    return count
