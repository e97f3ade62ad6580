"""LoRA adapters and modules trained whole beside them: injected before sharding, the same on every layout."""

from __future__ import annotations

import hashlib
import math
import warnings

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwise.engine.blocks import find_blocks
from shardwise.engine.compat import local_slices
from shardwise.engine.names import unwrapped_name
from shardwise.engine.shards import local
from shardwise.spec.method import Lora, goes_by
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
        if not any(goes_by(name, target) for name in names)
    ]
    if problems:
        raise BadInput(problems)


def _lies_in(name: str, outer: list[str]) -> bool:
    return any(name == one or name.startswith(one + ".") for one in outer)


def _whole_modules(model: nn.Module, lora: Lora, tensor: int) -> list[str]:
    """Return the full names of the modules that are trained whole.

    Raises:
        BadInput: naming every module that cannot be, and why.
    """
    wanted = list(lora.modules_to_save)
    if not wanted:
        return []
    if tensor > 1:
        reason = f"contradicts mesh.tensor: {tensor}, which does not split modules that are trained whole"
        raise BadInput(Problem(field="lora_modules_to_save", value=wanted, reason=reason, fix="remove one of the two"))
    modules = dict(model.named_modules())
    whole = {given: [name for name in modules if goes_by(name, given)] for given in wanted}
    all_whole = list(dict.fromkeys(name for names in whole.values() for name in names))
    unfit = _unfit(model, all_whole) | _adapted_too(model, lora, all_whole)
    problems = []
    for given, names in whole.items():
        reason, allowed, fix = next((unfit[name] for name in names if name in unfit), ""), "", "remove it"
        if not names:
            known = _known_names(model)
            reason, allowed = "matches no module of this model", f"names among {', '.join(known)}"
            fix = did_you_mean(given, known)
        if reason:
            problems.append(Problem(field="lora_modules_to_save", value=given, reason=reason, allowed=allowed, fix=fix))
    if problems:
        raise BadInput(problems)
    return all_whole


def _known_names(model: nn.Module) -> list[str]:
    """Return the last parts of the names of modules with weights that are a part of a block, or outside all."""
    blocks = {id(block) for block in find_blocks(model).modules}
    parts = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if _has_parameters(module) and not any(id(inner) in blocks for inner in module.modules())
    }
    return sorted(part for part in parts if not part.isdigit())


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _unfit(model: nn.Module, whole: list[str]) -> dict[str, str]:
    """Return module -> why it cannot be trained whole, of those that cannot."""
    blocks = {id(block) for block in find_blocks(model).modules}
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    unfit: dict[str, str] = {}
    for name in whole:
        module = model.get_submodule(name)
        shared = [one for p in module.parameters() for one in owners[id(p)] if not _lies_in(one, [name])]
        outer = [one for one in whole if one != name and _lies_in(name, [one])]
        if not _has_parameters(module):
            unfit[name] = f"{name} has no weights"
        elif any(id(inner) in blocks for inner in module.modules()):
            unfit[name] = f"{name} holds a whole block, which full fine-tuning (use_lora: false) is for"
        elif isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict):
            unfit[name] = f"{name} is a {type(module).__name__}, which is never called"
        elif outer:
            unfit[name] = f"{name} lies in {outer[0]}, which is trained whole"
        elif shared:
            unfit[name] = f"{name} shares its weights with {shared[0]}, and a trained copy would part the two"
    return unfit


def _adapted_too(model: nn.Module, lora: Lora, whole: list[str]) -> dict[str, str]:
    """Return module -> why it cannot be trained whole, of those in which `lora_targets` names a layer."""
    if lora.targets == "all_linear":
        return {}
    linear = [name for name, module in model.named_modules() if _is_linear(module) and _lies_in(name, whole)]
    adapted = {name: target for target in lora.targets for name in linear if goes_by(name, target)}
    return {
        outer: f"contradicts lora_targets: {target}, which gives {name} an adapter"
        for outer in whole
        for name, target in adapted.items()
        if _lies_in(name, [outer])
    }


def _names_for_peft(model: nn.Module, lora: Lora, whole: list[str]) -> list[str] | None:
    """Return names by which PEFT finds exactly the modules `whole`; None when there are none.

    PEFT takes every module whose name ends in the letters given (`norm`: `input_layernorm` too): then full names.
    """
    names = [name for name, _ in model.named_modules()]
    by_letters = {name for name in names if any(name.endswith(given) for given in lora.modules_to_save)}
    return (list(lora.modules_to_save) if by_letters == set(whole) else whole) or None


def _all_linear(model: nn.Module, lora: Lora, whole: list[str]) -> list[str]:
    """Return the suffixes of linear layers outside the head and outside what is trained whole."""
    outside = {name.rpartition(".")[2] for name, module in model.named_modules() if not _lies_in(name, whole)}
    targets = [suffix for suffix in linear_suffixes(model) if suffix in outside]
    if whole and not targets:
        given, reason = list(lora.modules_to_save), "leaves no linear layer for an adapter"
        raise BadInput(
            Problem(field="lora_modules_to_save", value=given, reason=reason, fix="train all weights: use_lora: false")
        )
    return targets


def add_adapters(model: nn.Module, lora: Lora, *, tensor: int = 1) -> nn.Module:
    """Freeze `model`, add LoRA adapters in fp32 and trained copies of whole modules; returns the PEFT model.

    Works on the meta device. Called before checkpointing and sharding: adapters added later would stay whole on every
    rank and never be reduced. `tensor` is the number of ranks of the mesh's tensor axis.

    Raises:
        BadInput: when a target matches no linear layer, a module cannot be trained whole, or PEFT does not support an
            adapter on this model.
    """
    whole = _whole_modules(model, lora, tensor)
    linear = [name for name, module in model.named_modules() if _is_linear(module) and not _lies_in(name, whole)]
    if lora.targets == "all_linear":
        targets = _all_linear(model, lora, whole)
    else:
        _check_targets(model, list(lora.targets))
        targets = list(lora.targets)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=_whole_number(lora.alpha),
        lora_dropout=lora.dropout,
        target_modules=targets,
        modules_to_save=_names_for_peft(model, lora, whole),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # between PEFT and transformers, nothing a user can mend
            adapted: nn.Module = get_peft_model(model, config, low_cpu_mem_usage=True)
    except ValueError as error:
        reason = f"PEFT refuses these adapters: {str(error).strip().splitlines()[0]}"
        raise BadInput(Problem(field="lora_targets", value=targets, reason=reason)) from error
    _refuse_moved(adapted, [name for name in linear if any(goes_by(name, target) for target in targets)], targets)
    return adapted


def _refuse_moved(adapted: nn.Module, wanted: list[str], targets: list[str]) -> None:
    """Refuse adapters that PEFT puts elsewhere: on mixtures it takes names of dense layers for those of experts.

    Raises:
        BadInput: naming a layer that got none, or one that nobody asked for.
    """
    prefix = "base_model.model."
    have = {name.removeprefix(prefix) for name, module in adapted.named_modules() if hasattr(module, "lora_A")}
    missing, extra = sorted(set(wanted) - have), sorted(have - set(wanted))
    if missing or extra:
        told = [f"none on {missing[0]}"] * bool(missing) + [f"one on {extra[0]}"] * bool(extra)
        dense = sorted({name.rpartition(".")[2] for name in wanted} - {name.rpartition(".")[2] for name in missing})
        raise BadInput(
            Problem(
                field="lora_targets",
                value=targets,
                reason=f"PEFT puts adapters elsewhere in this mixture of experts: {' and '.join(told)}",
                fix=f"name the layers outside experts, such as [{', '.join(dense)}]" if dense else "",
            )
        )


def _whole_number(alpha: float) -> int | float:
    """Whole numbers stay whole in the saved adapter."""
    return int(alpha) if alpha.is_integer() else alpha


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
            torch.nn.init.zeros_(local(parameter))
        elif ".lora_A." in name:
            bound = math.sqrt(3.0) * math.sqrt(2.0 / (1 + 5)) / math.sqrt(parameter.shape[1])
            whole = torch.empty(parameter.shape, dtype=torch.float32)
            whole.uniform_(-bound, bound, generator=_generator(seed, unwrapped_name(name)))
            local(parameter).copy_(whole[local_slices(parameter)])
        else:
            continue
        count += 1
    return count
