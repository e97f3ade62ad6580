"""Tensor parallelism: the matrix products of every block shared by the ranks of the `tensor` axis."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardwise.engine.compat import strided_shard
from shardwise.engine.names import unwrapped_name
from shardwise.engine.tp_plan import (
    COLUMN,
    ON_SEQUENCE,
    ROW,
    STYLES,
    WHOLE_FOR_PARTIAL,
    Site,
    Style,
    blocks_name,
    container,
    plain_model,
    sites,
    tensor_plan,
)
from shardwise.engine.tp_sequence import WholeParts, enter_sequence, sequence_norms
from shardwise.spec.layout import Mesh


@dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """Everything that tensor parallelism does to a model, by module name in the plain model."""

    styles: dict[str, Style]
    """Modules whose weights, inputs and outputs have a layout on the axis; the two halves of an adapter apart."""
    entries: dict[str, Placement]
    """Parts of a block where a whole activation enters -> its gradient there: one reduction then serves all layers
    inside."""
    blocks: str
    """Name of the list of blocks."""
    sequence_parallel: bool
    """Between those parts, activations are split along the sequence."""
    notes: tuple[str, ...]
    """What stays whole although it could be split, and why."""


def tensor_layout(model: nn.Module, ranks: int, *, sequence_parallel: bool) -> TensorLayout:
    """Return what `parallelize` does to a model on `ranks` ranks.

    A function of the model's plan and structure: nothing is read from sharded tensors, so a live model can be compared
    with it.

    Raises:
        BadInput: the model cannot be split correctly.
    """
    plan, plain = tensor_plan(model, ranks), plain_model(model)
    blocks, all_sites = blocks_name(plain), list(sites(plain))
    styles: dict[str, Style] = {}
    if sequence_parallel:
        styles |= sequence_norms(plain, all_sites, plan.words, blocks)
    entries = _entries(all_sites, plan.words, blocks, sequence_parallel)
    for site in all_sites:
        word = plan.words.get(site.name)
        if word is None:
            continue
        holder = container(site.name, blocks)
        style = STYLES[word]
        if word in ROW and holder is not None and sequence_parallel:
            style = replace(style, gives=Shard(1))
        if word in COLUMN and holder is not None and entries.get(holder) == Partial():
            style = replace(style, takes_grad=Partial())
        styles |= _with_adapter(site, word, style)
    return TensorLayout(
        styles=styles, entries=entries, blocks=blocks, sequence_parallel=sequence_parallel, notes=plan.notes
    )


def _entries(
    all_sites: list[Site], words: dict[str, str], blocks: str, sequence_parallel: bool
) -> dict[str, Placement]:
    """Return the parts of blocks at whose input gradients are reduced for all layers inside at once."""
    named: dict[str, list[str | None]] = {}
    for site in all_sites:
        holder = container(site.name, blocks)
        if holder is not None:
            named.setdefault(holder, []).append(words.get(site.name))
    entries: dict[str, Placement] = {}
    for holder, inside in named.items():
        if any(word in COLUMN for word in inside):
            entries[holder] = Replicate() if None in inside else Partial()
    return {name: given for name, given in entries.items() if sequence_parallel or given == Partial()}


def _with_adapter(site: Site, word: str, style: Style) -> dict[str, Style]:
    """Return the styles of a module, or of the parts of the adapter around it.

    Of an adapter A, B around a split layer, the half that touches the split side is split as the layer is.
    """
    if site.module is site.base:
        return {site.name: style}
    parts = {f"{site.name}.base_layer": style}
    adapter: Any = site.module
    for adapter_name in adapter.lora_A:
        a, b = f"{site.name}.lora_A.{adapter_name}", f"{site.name}.lora_B.{adapter_name}"
        if word in COLUMN:
            parts[b] = replace(style, takes_grad=None)
            if style.takes_grad is not None:
                parts[a] = WHOLE_FOR_PARTIAL
        else:
            parts[a] = style
            if style.gives == Shard(1):
                parts[b] = ON_SEQUENCE
    return parts


def parallelize(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Split a model over the 1-D mesh `tensor`, in place; before checkpoint wrapping and `fully_shard`.

    Every rank calls it with the same model, on the meta device or with the same weights; adapters are in it. Modules
    keep taking and giving plain tensors. Flags requires_grad and tied weights stay as they were.

    Raises:
        BadInput: the model cannot be split correctly.
    """
    layout = tensor_layout(model, mesh.size(), sequence_parallel=sequence_parallel)
    plain = plain_model(model)
    tied = [names for names in _names_by_parameter(plain).values() if len(names) > 1]
    for name, style in layout.styles.items():
        _distribute(plain.get_submodule(name), style, mesh)
    for names in tied:
        kept = plain.get_parameter(names[0])
        for name in names[1:]:
            owner, _, last = name.rpartition(".")
            plain.get_submodule(owner).register_parameter(last, kept)
    for name, gradient in layout.entries.items():
        entry = plain.get_submodule(name)
        taken: Placement = Shard(1) if sequence_parallel else Replicate()
        entry.register_forward_pre_hook(_at_first_input(entry, _entry(mesh, taken, gradient)), with_kwargs=True)
    if sequence_parallel:
        first = plain.get_submodule(f"{layout.blocks}.0")
        first.register_forward_pre_hook(_at_first_input(first, enter_sequence(mesh)), with_kwargs=True)
        decoder = plain.get_submodule(layout.blocks.rpartition(".")[0])
        parts = WholeParts(mesh.size())
        decoder.register_forward_pre_hook(parts.pad, with_kwargs=True)
        decoder.register_forward_hook(parts.cut)


def _names_by_parameter(plain: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in plain.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _distribute(module: nn.Module, style: Style, mesh: DeviceMesh) -> None:
    """Make the module's parameters DTensors, and lay out what goes in and comes out."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        placement = style.bias if name == "bias" else style.weight
        split = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))

    def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        local: torch.Tensor = inputs[0]
        taken = [_counted_from_first(style.takes, local.ndim)]
        gradient = None if style.takes_grad is None else [style.takes_grad]
        given = DTensor.from_local(local, mesh, taken, grad_placements=gradient)
        if style.computes is not None:
            given = given.redistribute(placements=[_counted_from_first(style.computes, local.ndim)])
        return given, *inputs[1:]

    def after(_: nn.Module, __: tuple[Any, ...], output: DTensor) -> torch.Tensor:
        return output.redistribute(placements=[_counted_from_first(style.gives, output.ndim)]).to_local()

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def _counted_from_first(placement: Placement, ndim: int) -> Placement:
    """Return the placement with its dim counted from the first one."""
    return Shard(placement.dim % ndim) if isinstance(placement, Shard) else placement


def _entry(mesh: DeviceMesh, taken: Placement, gradient: Placement) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the step from what a part of a block is given to the whole activation inside it."""

    def enter(given: torch.Tensor) -> torch.Tensor:
        whole = DTensor.from_local(given, mesh, [taken]).redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[gradient])

    return enter


def _at_first_input(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """Return a hook that changes a module's first input, given by place or by name."""
    name = next(iter(inspect.signature(module.forward).parameters))

    def hook(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if inputs:
            return (change(inputs[0]), *inputs[1:]), named
        return inputs, {**named, name: change(named[name])}

    return hook


def planned_placements(model: nn.Module, mesh: Mesh) -> dict[str, tuple[Placement, ...]]:
    """Return where every parameter of a sharded model has to lie, by its name without wrappers.

    One placement per axis of the parameter's own mesh: that of `data_mesh`, and after it `tensor` for what tensor
    parallelism lays out. From the plan alone, whatever the live tensors are.
    """
    data: tuple[Placement, ...] = (Shard(0),) if mesh.replicate == 1 else (Replicate(), Shard(0))
    if mesh.tensor == 1:
        return {unwrapped_name(name): data for name, _ in model.named_parameters()}
    layout = tensor_layout(model, mesh.tensor, sequence_parallel=mesh.sequence_parallel)
    prefix = "base_model.model." if plain_model(model) is not model else ""
    planned: dict[str, tuple[Placement, ...]] = {}
    for full_name, _ in model.named_parameters():
        name = unwrapped_name(full_name)
        owner, _, last = name.removeprefix(prefix).rpartition(".")
        style = layout.styles.get(owner)
        if style is None:
            planned[name] = data
            continue
        across = style.bias if last == "bias" else style.weight
        shard = strided_shard(0, mesh.tensor) if across == Shard(0) else data[-1]
        planned[name] = (*data[:-1], shard, across)
    return planned
