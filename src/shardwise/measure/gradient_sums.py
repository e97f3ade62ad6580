"""Sums of gradients in place, as autograd makes them when no dispatch mode watches.

Where a tensor was used twice, autograd adds up two gradients: into the first one's memory when nothing else holds it.
The gradient of an indexed read is added into zeros in place. Under any dispatch mode it does neither, so a run that is
watched would take more memory than one that is not, and a run in fake tensors would say so. `GradientSums` sees the
additions and does them in place under autograd's own conditions. How many references autograd's own hold makes up is
learnt once, from sums that are known to be held by nobody else.

One such difference stays: attention by its formula (on CPUs, with dropout) adds its mask out of place.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.engine.compat_memory import holders, in_backward, is_fake

_aten: Any = torch.ops.aten

IN_PLACE: dict[object, Any] = {
    _aten.add.Tensor: _aten.add_.Tensor,
    _aten.index_add.default: _aten.index_add_.default,
    _aten.index_put.default: _aten.index_put_.default,
    _aten.scatter_add.default: _aten.scatter_add_.default,
}
"""Additions that autograd makes out of place under a dispatch mode -> what it does otherwise."""


class GradientSums:
    """Decides which additions are autograd's and can be done in place."""

    def __init__(self) -> None:
        self._alone: dict[object, tuple[int, ...]] = {}
        self.learning = False
        """The sums that are added up now are the known ones."""

    def learn(self) -> None:
        """Find out how a gradient looks that autograd alone holds; called with the dispatch mode entered."""
        self.learning = True
        with torch.enable_grad():
            leaf = torch.zeros(2, requires_grad=True)
            place = torch.zeros(1, dtype=torch.int64)
            used = leaf * 2
            sums = [used.sin() + used.cos(), used.index_select(0, place), used[place], used.gather(0, place)]
            for known in sums:
                torch.autograd.backward(known.sum(), retain_graph=True)
        self.learning = False

    def in_place(self, operator: object, args: tuple[object, ...], kwargs: object) -> bool:
        """Whether an addition of IN_PLACE, with its arguments, is one that autograd would do in place."""
        if torch.is_grad_enabled() or not in_backward() or not _fits(args, kwargs):
            return False
        found = holders(args)
        if self.learning:
            self._alone[operator] = found
        return found == self._alone.get(operator)


def _fits(args: tuple[object, ...], kwargs: object) -> bool:
    """Whether the first argument's memory can take the sum."""
    if kwargs or not all(_is_plain(arg) for arg in args if isinstance(arg, torch.Tensor)):
        return False
    first, second = args[:2]
    if not isinstance(first, torch.Tensor) or not _is_dense(first):
        return False
    added = second if len(args) == 2 else first
    return isinstance(added, torch.Tensor) and added.shape == first.shape and added.dtype == first.dtype


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor or is_fake(tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill its part of the memory without gap or overlap, in whatever order of its dims."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
