"""The ModelSpec of a real model of transformers on the meta device: the shape as it is, not by formula."""

from __future__ import annotations

import re
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D

from shardwise.catalogue.families.kinds import kind_names
from shardwise.catalogue.families.tree import present_rules
from shardwise.engine.blocks import find_blocks
from shardwise.engine.units import is_tied
from shardwise.spec.model_spec import Activation, Attention, BlockKind, Mlp, ModelSpec, Module, Tensor
from shardwise.spec.problems import BadInput, Problem

_ACTIVATIONS: tuple[tuple[str, Activation], ...] = (
    ("SILU", "silu"),
    ("GELU", "gelu"),
    ("RELUSQUARED", "relu2"),
    ("RELU", "relu"),
)
"""Part of an activation module's class name -> the function."""

_FUSED = ("c_attn", "query_key_value", "Wqkv", "qkv_proj")
"""Names of projections that hold query, key and value in one."""


def config_of(spec: ModelSpec) -> Any:
    """Return transformers' configuration of a ModelSpec, for `engine.source.build_on_meta`.

    Raises:
        BadInput: transformers does not take it.
    """
    try:
        return AutoConfig.for_model(**spec.config)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        reason = f"transformers does not take its configuration: {' '.join(str(error).split())}"
        raise BadInput(Problem(field="model", value=spec.name, reason=reason)) from error


def model_spec_of(model: nn.Module, config: dict[str, Any], *, name: str, note: str = "") -> ModelSpec:
    """Return the shape of a plain causal LM of transformers, not sharded, without adapters.

    Args:
        model: The causal LM, on any device, built in a 16-bit dtype: only then does it show what stays in fp32.
        config: Fields of its configuration, `model_type` among them.
        name: What it is called.
        note: What a reader has to know.

    Raises:
        BadInput: it shows no embedding or head, no blocks, or blocks in which attention and MLP are not found.
    """
    causal_lm = cast(Any, model)
    embedding, head = causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()
    if embedding is None or head is None:
        raise _refused(model, "it shows no embedding or no head")
    blocks = find_blocks(model)
    found = [_kind(block, causal_lm.config, index) for index, block in enumerate(blocks.modules)]
    kinds: list[_Kind] = []
    for kind in found:
        if kind not in kinds:
            kinds.append(kind)
    names = kind_names([(attention, mlp) for attention, mlp, _, _ in kinds])
    block_kinds = tuple(
        BlockKind(name=kind_name, attention=attention, mlp=mlp, tensors=tensors, modules=modules)
        for kind_name, (attention, mlp, tensors, modules) in zip(names, kinds, strict=True)
    )
    inside = blocks.name + "."
    modules = tuple(entry for entry in _modules(model) if not entry.name.startswith(inside))
    place = {id(module): module_name for module_name, module in model.named_modules()}
    return ModelSpec(
        name=name,
        model_type=causal_lm.config.model_type,
        config=config,
        hidden=causal_lm.config.hidden_size,
        vocab=embedding.weight.shape[0],
        max_positions=_positions(causal_lm.config),
        kinds=block_kinds,
        blocks=tuple(kinds.index(kind) for kind in found),
        block_list=blocks.name,
        embedding=place[id(embedding)],
        head=place[id(head)],
        tied=is_tied(embedding, head),
        outside=tuple(tensor for tensor in _tensors(model) if not tensor.name.startswith(inside)),
        modules=modules,
        tensor_rules=present_rules(causal_lm.tp_plan or {}, modules, block_kinds, blocks.name),
        note=note,
    )


_Kind = tuple[Attention, Mlp, tuple[Tensor, ...], tuple[Module, ...]]


def _kind(block: nn.Module, config: Any, index: int) -> _Kind:
    holder = next((m for m in block.modules() if "Attention" in type(m).__name__), None)
    if holder is None:
        raise _refused(block, f"block {index} holds no attention")
    rest = [module for name, module in block.named_modules() if not _lies_in(name, block, holder)]
    return _attention(holder, config, index), _mlp(block, rest, config), tuple(_tensors(block)), tuple(_modules(block))


def _lies_in(name: str, block: nn.Module, holder: nn.Module) -> bool:
    outer = next(found for found, module in block.named_modules() if module is holder)
    return name == outer or name.startswith(outer + ".")


def _attention(holder: nn.Module, config: Any, index: int) -> Attention:
    """Read an attention's heads off its projections."""
    heads = int(config.num_attention_heads)
    layers = {name.rpartition(".")[2]: _sizes(module) for name, module in holder.named_modules() if _is_linear(module)}
    if "kv_b_proj" in layers:
        sizes = cast(Any, holder)
        return Attention(
            kind="latent", heads=heads, kv_heads=heads, head_dim=sizes.qk_head_dim, value_dim=sizes.v_head_dim
        )
    head_dim = int(getattr(holder, "head_dim", None) or config.hidden_size // heads)
    fused = next((layers[name] for name in _FUSED if name in layers), None)
    if fused is not None:
        kv_heads = (fused[1] // head_dim - heads) // 2
    elif "q_proj" in layers and "k_proj" in layers:
        heads, kv_heads = layers["q_proj"][1] // head_dim, layers["k_proj"][1] // head_dim
    else:
        raise _refused(holder, f"the attention of block {index} has no query and key projections")
    return Attention(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=head_dim, window=_window(holder, config, index)
    )


def _window(holder: nn.Module, config: Any, index: int) -> int | None:
    """Return the tokens that a block's attention looks back on; None: all."""
    if hasattr(holder, "sliding_window"):
        return cast(Any, holder).sliding_window or None
    types = getattr(config, "layer_types", None)
    if types is not None and types[index] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None) or None


def _mlp(block: nn.Module, rest: list[nn.Module], config: Any) -> Mlp:
    """Read a feed-forward part off its layers; the last of them leads back to the hidden size."""
    activation = next((act for module in rest for act in _activation(module)), None)
    if activation is None:
        raise _refused(block, "its MLP has no activation function that is known")
    experts = next((module for module in rest if _experts(module)), None)
    if experts is not None:
        up, down = cast(Any, experts).gate_up_proj, cast(Any, experts).down_proj
        count = int(down.shape[0])
        width = int(down.numel()) // count // int(config.hidden_size)
        return Mlp(
            gated=up.numel() == 2 * down.numel(),
            activation=activation,
            width=width,
            experts=count,
            active=int(config.num_experts_per_tok),
            shared_width=_shared_width(block),
        )
    layers = [_sizes(module) for module in rest if _is_linear(module)]
    if len(layers) < 2:
        raise _refused(block, "its MLP has no two linear layers")
    width = layers[-1][0]
    return Mlp(gated=sum(out for _, out in layers[:-1]) == 2 * width, activation=activation, width=width)


def _experts(module: nn.Module) -> bool:
    """Whether a module holds experts in fused tensors."""
    tensors = dict(module.named_parameters(recurse=False))
    return {"gate_up_proj", "down_proj"} <= set(tensors) and tensors["down_proj"].ndim == 3


def _shared_width(block: nn.Module) -> int:
    return sum(
        _sizes(module)[0]
        for name, module in block.named_modules()
        if re.search(r"\bshared_experts?\.down_proj$", name) and _is_linear(module)
    )


def _activation(module: nn.Module) -> list[Activation]:
    if next(module.children(), None) is not None:
        return []
    kind = type(module).__name__.upper()
    return [function for part, function in _ACTIVATIONS if part in kind][:1]


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


def _sizes(layer: nn.Module) -> tuple[int, int]:
    """Return (inputs, outputs) of a linear layer."""
    rows, columns = cast(Any, layer).weight.shape
    return (rows, columns) if isinstance(layer, Conv1D) else (columns, rows)


def _tensors(module: nn.Module) -> list[Tensor]:
    found = list(module.named_parameters())
    some_16_bit = any(p.dtype != torch.float32 for _, p in found)
    return [Tensor(name=name, shape=tuple(p.shape), fp32=some_16_bit and p.dtype == torch.float32) for name, p in found]


def _modules(module: nn.Module) -> list[Module]:
    return [
        Module(name=name, kind=type(inner).__name__)
        for name, inner in module.named_modules()
        if next(inner.parameters(), None) is not None
    ]


def _positions(config: Any) -> int | None:
    """Return the longest sequence that the model has positions for."""
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)


def _refused(module: nn.Module, reason: str) -> BadInput:
    return BadInput(
        Problem(
            field="model",
            value=type(module).__name__,
            reason=f"its shape cannot be read: {reason}",
            fix="use a causal LM of transformers with attention and an MLP in every block",
        )
    )
