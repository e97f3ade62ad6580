"""What a small transformers model really computes: every operation of a step that does work, by part."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from predict.blocks_truth import Batch
from shardwise.engine.blocks import find_blocks
from shardwise.engine.loss_head import token_loss

_NOTHING = (
    "_unsafe_view",
    "detach",
    "alias",
    "lift_fresh",
    "_local_scalar_dense",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
)
"""Operations beside views that do nothing to elements."""


_LOOKUPS = ("embedding", "index_select", "nll_loss_forward")
"""Operations that read as many elements of a tensor as they write, not all."""

_FILLS = ("zero_", "fill_", "bernoulli_")
"""Operations that write in place what they have not read."""

Sizes = tuple[int, int, int, int]
"""Batch, rows, inner dimension and columns of a matrix product; rows and columns in ascending order."""


@dataclass
class Seen:
    """Operations of one part of a step."""

    products: Counter[Sizes] = field(default_factory=Counter)
    """Matrix products."""
    product_flops: int = 0
    """FLOPs of them, by torch's counter."""
    attention_flops: int = 0
    """FLOPs of attention kernels, by torch's counter."""
    operations: int = 0
    """All operations that do work."""
    moved: int = 0
    """Bytes of the tensors that pointwise operations and reductions read and write."""
    names: Counter[str] = field(default_factory=Counter)
    """Pointwise operations and reductions by name."""


class Watch(TorchDispatchMode):
    """Sorts every operation into the part that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.part = "embedding"
        self.seen: dict[str, Seen] = {}

    def enter(self, name: str, *_: object) -> None:
        """From here on another part runs."""
        self.part = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and note an operation."""
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if func.is_view or name in _NOTHING or name.startswith("profiler::"):
            return out
        seen = self.seen.setdefault(self.part, Seen())
        seen.operations += 1
        packet = func._overloadpacket
        if "attention" in name:
            seen.attention_flops += _attention_flops(args, backward="backward" in name)
            return out
        if name == "_grouped_mm":
            flops, sizes = _grouped(*args[:2], kwargs["offs"] if kwargs and "offs" in kwargs else args[2])
            seen.product_flops += flops
            seen.products[sizes] += 1
            return out
        if packet in flop_registry:
            seen.product_flops += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
            seen.products[_sizes(name, args)] += 1
            return out
        seen.names[name] += 1
        written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        in_place = any(a is w for a in read for w in written)
        if name in _LOOKUPS:
            read = written
        elif in_place and name in _FILLS:
            read = []
        seen.moved += sum(map(_bytes, written)) + sum(map(_bytes, read))
        return out


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of the memory that a tensor looks at: what is expanded counts once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()


def _attention_flops(args: Any, *, backward: bool) -> int:
    """FLOPs of an attention kernel on the whole square, as torch's counter has them for the kernels of GPUs."""
    if backward:
        gradient, *shapes = (tensor.shape for tensor in args[:4])
        return int(sdpa_backward_flop_count(gradient, *shapes))
    return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))


def _grouped(first: torch.Tensor, second: torch.Tensor, offsets: torch.Tensor) -> tuple[int, Sizes]:
    """FLOPs of a grouped product, which torch's counter does not know, and its sizes if all groups were equal."""
    groups, rows, columns = len(offsets), first.shape[0], second.shape[-1]
    if second.dim() == 2:  # one product per group, over the rows of that group
        inner = first.shape[1]
        busy = min(groups, inner)
        return 2 * inner * rows * columns, ordered(busy, rows, -(-inner // busy), columns)
    busy = min(groups, rows)
    return 2 * rows * first.shape[1] * columns, ordered(busy, -(-rows // busy), first.shape[1], columns)


def ordered(batch: int, rows: int, inner: int, columns: int) -> Sizes:
    """Sizes of a product, the same for its transpose."""
    return batch, min(rows, columns), inner, max(rows, columns)


def _sizes(name: str, args: Any) -> Sizes:
    first, second = args[1:3] if "add" in name else args[:2]
    if first.dim() == 3:
        return ordered(first.shape[0], first.shape[1], first.shape[2], second.shape[2])
    return ordered(1, first.shape[0], first.shape[1], second.shape[-1])


def watch(model: nn.Module, rows: int, length: int, vocab: int) -> dict[str, Seen]:
    """Return what each part of one step does.

    Parts are named `embedding`, `block 0`, ..., `head`, and the same with ` backward`.
    """
    ids = torch.randint(vocab, (rows, length))
    batch = Batch(ids, torch.ones_like(ids), ids.clone())
    blocks = find_blocks(model).modules
    seen = Watch()
    for index, block in enumerate(blocks):
        block.register_forward_pre_hook(partial(_before, seen, index), with_kwargs=True)
        block.register_forward_hook(partial(_behind, seen, index, len(blocks)))
    token_loss(model, batch).backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)
    seen.enter("embedding")
    with seen:
        loss = token_loss(model, batch)
        seen.enter("head backward")
        loss.backward()  # type: ignore[no-untyped-call]
    return seen.seen


def _before(seen: Watch, index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if " backward" in seen.part:
        return
    seen.enter(f"block {index}")
    given: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    if given.requires_grad:
        after = "embedding backward" if index == 0 else f"block {index - 1} backward"
        given.register_hook(partial(seen.enter, after))


def _behind(seen: Watch, index: int, count: int, _: nn.Module, __: object, output: Any) -> None:
    if " backward" in seen.part or index < count - 1:
        return
    made: torch.Tensor = output[0] if isinstance(output, tuple) else output
    seen.enter("head")
    if made.requires_grad:
        made.register_hook(partial(seen.enter, f"block {index} backward"))
