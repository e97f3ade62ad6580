"""Hooks that tell a StorageBook where the step is and what tensors are for; all of them come off again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.engine.apply import units
from shardwise.engine.blocks import find_blocks
from shardwise.engine.compat_memory import Moment, groups_of, held_by, in_backward, recomputed_part, watch_units
from shardwise.engine.names import base_name
from shardwise.engine.resting_state import RestingOptimizer
from shardwise.measure.storage_book import LOSS, StorageBook
from shardwise.spec.footprint import Category

ROOT, GRADIENTS, OPTIMIZER = "root", "gradients", "optimizer"
"""Units at work that are no modules: what is in no block; between backward and optimizer; the optimizer."""

_BIRTHS: dict[Moment, Category] = {
    "gather": "all_gather_buffers",
    "copy_out": "all_gather_buffers",
    "hold": "unsharded_parameters",
    "reshard": "unsharded_parameters",
    "post_backward": "unsharded_gradients",
    "reduce": "reduce_scatter_buffers",
}
"""What FSDP2 does -> what storages that are born in it are for."""


class Landmarks:
    """The hooks of one model and one optimizer."""

    def __init__(self, book: StorageBook) -> None:
        self.book = book
        """Where they report."""
        self.pinned = False
        """The phase is given by the caller."""
        self._stack = ExitStack()
        self._places: dict[int, str] = {}
        self._known_groups: set[int] = set()
        self._gathered_groups: set[int] = set()
        self._hooked: set[int] = set()
        self._offloaded = False
        self._has_head = False
        self._forwards = 0

    def close(self) -> None:
        """Take all hooks out."""
        self._stack.close()

    def look(self) -> None:
        """Before each operator: find out whether autograd is at work."""
        self.book.settle()
        if self.pinned:
            return
        key = self.book.key
        if in_backward():
            if key.phase != "backward":
                self.book.move(phase="backward", where=LOSS if self._has_head else ROOT)
        elif key.phase == "backward" and key.where != GRADIENTS:
            self.book.move(where=GRADIENTS)

    def watch_model(self, model: nn.Module) -> None:
        """Register what a model holds and hook its root, blocks, embedding and head.

        Raises:
            BadInput: a model without blocks.
        """
        self._hold(model)
        blocks = find_blocks(model)
        name = base_name(blocks.name)
        for index, block in enumerate(blocks.modules):
            self._watch_unit(block, f"{name}.{index}")
            inner = recomputed_part(block)
            self._keep(inner.register_forward_pre_hook(self._recompute_begins, prepend=True))
            self._keep(inner.register_forward_hook(self._recompute_ends, always_call=True))
        embedding = getattr(model, "get_input_embeddings", lambda: None)()
        if isinstance(embedding, FSDPModule):
            names = {id(module): name for name, module in model.named_modules()}
            self._watch_unit(cast(nn.Module, embedding), base_name(names[id(embedding)]))
        head = getattr(model, "get_output_embeddings", lambda: None)()
        if head is not None:
            self._has_head = True
            self._places.update({id(module): LOSS for module in head.modules() if id(module) not in self._places})
            self._keep(head.register_forward_pre_hook(self._loss_begins, prepend=True))
        self._keep(model.register_forward_pre_hook(self._root_begins, prepend=True, with_kwargs=True))
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            self._watch_groups(model)
        else:
            for parameter in model.parameters():
                self._watch_gradient(parameter, "sharded_gradients")

    def _hold(self, model: nn.Module) -> None:
        """Register parameters, buffers and gradients."""
        self._offloaded = any(held_by(group).offloaded for unit in units(model) for group in groups_of(unit))
        self._add_shards(model.parameters(), "sharded_parameters")
        self._add_shards((p.grad for p in model.parameters() if p.grad is not None), "sharded_gradients")
        self.book.add(model.buffers(), "buffers")

    def _add_shards(self, tensors: Iterable[torch.Tensor], category: Category) -> None:
        self.book.add(tensors, "offloaded" if self._offloaded else category)

    def watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Register what an optimizer holds and hook its steps."""

        def begins(*_: object) -> None:
            if not self.pinned:
                self.book.move(phase="optimizer_step", where=OPTIMIZER)

        def ends(*_: object) -> None:
            self._add_states(optimizer)
            self._forwards = 0
            if not self.pinned:
                self.book.move(step=self.book.key.step + 1, micro_batch=0, where=ROOT)

        self._add_states(optimizer)
        self._keep(optimizer.register_step_pre_hook(begins))
        self._keep(optimizer.register_step_post_hook(ends))

    def _add_states(self, optimizer: torch.optim.Optimizer) -> None:
        on_host = self._offloaded or (isinstance(optimizer, RestingOptimizer) and optimizer.on_host)
        tensors = (v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor))
        self.book.add(tensors, "offloaded" if on_host else "optimizer_states")

    def _keep(self, handle: Any) -> None:
        self._stack.callback(handle.remove)

    def _watch_unit(self, module: nn.Module, name: str) -> None:
        """Follow one unit's forward and backward."""

        def ends_backward(_: torch.Tensor) -> None:
            if self.book.key.where == name:
                self.book.move(where=ROOT)

        def begins_backward(_: torch.Tensor) -> None:
            self.look()
            self.book.move(where=name)

        def before(_: nn.Module, args: object, kwargs: object) -> None:
            if not in_backward():
                self.book.move(where=name)
                _hook_gradients((args, kwargs), ends_backward)

        def made(_: nn.Module, args: object, output: object) -> None:
            if not in_backward():
                _hook_gradients(output, begins_backward)

        def after(*_: object) -> None:
            if not in_backward():
                self.book.move(where=ROOT)

        self._places.update({id(inner): name for inner in module.modules()})
        self._keep(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._keep(module.register_forward_hook(made, prepend=True))
        self._keep(module.register_forward_hook(after, always_call=True))

    def _recompute_begins(self, *_: object) -> None:
        if in_backward():
            self.book.begin_recompute()

    def _recompute_ends(self, *_: object) -> None:
        if in_backward():
            self.book.end_recompute()

    def _root_begins(self, _: nn.Module, args: object, kwargs: object) -> None:
        if in_backward():
            return
        if not self.pinned:
            if torch.is_grad_enabled():
                self.book.move(phase="forward", where=ROOT, micro_batch=self._forwards)
                self._forwards += 1
            else:
                self.book.move(phase="evaluation", where=ROOT)
        self.book.add(_tensors((args, kwargs)), "inputs")

    def _loss_begins(self, _: nn.Module, args: object) -> None:
        if in_backward():
            return
        self.book.move(where=LOSS)

        def ends_backward(gradient: torch.Tensor) -> None:
            self.book.add((gradient,), "temporaries")
            self.book.move(where=ROOT)

        _hook_gradients(args, ends_backward)

    def _watch_groups(self, model: nn.Module) -> None:
        places: dict[int, str] = {}
        for unit in units(model):
            for group in groups_of(unit):
                places[id(group)] = self._places.get(id(unit), ROOT)
                self._take_in(group)
        self._stack.enter_context(watch_units(lambda moment, group: self._around(places, moment, group)))

    def _around(self, places: dict[int, str], moment: Moment, group: Any) -> AbstractContextManager[None]:
        if group is not None and id(group) not in places:
            return nullcontext()
        return self._in_group(places, moment, group)

    @contextmanager
    def _in_group(self, places: dict[int, str], moment: Moment, group: Any) -> Iterator[None]:
        if moment == "gather" and id(group) not in self._known_groups:
            self._known_groups.add(id(group))
            self._add_shards(held_by(group).shards, "sharded_parameters")
        if moment == "post_backward":
            self.book.move(phase=None if self.pinned else "backward", where=places[id(group)])
        with self.book.births(_BIRTHS[moment]):
            yield
        if moment == "copy_out" and id(group) not in self._gathered_groups:
            self._take_in(group)
        if moment == "post_backward":
            held = held_by(group)
            self._add_shards(held.sharded_gradients, "sharded_gradients")
            self.book.add(held.unsharded_gradients, "unsharded_gradients")

    def _take_in(self, group: Any) -> None:
        """Register a unit's gathered parameters, from the time on when there are any."""
        unsharded = held_by(group).unsharded
        if unsharded:
            self._gathered_groups.add(id(group))
        self.book.add(unsharded, "unsharded_parameters")
        for parameter in unsharded:
            self._watch_gradient(parameter, "unsharded_gradients")

    def _watch_gradient(self, parameter: torch.Tensor, category: Category) -> None:
        """Say what a leaf's gradient is for, as soon as it is there."""

        def accumulated(leaf: torch.Tensor) -> None:
            if leaf.grad is not None:
                self.book.add((leaf.grad,), category)

        if parameter.requires_grad and id(parameter) not in self._hooked:
            self._hooked.add(id(parameter))
            self._keep(cast(Any, parameter).register_post_accumulate_grad_hook(accumulated))


def _hook_gradients(value: object, hook: Callable[[torch.Tensor], None]) -> None:
    for tensor in _tensors(value):
        if tensor.requires_grad:
            cast(Any, tensor).register_hook(hook)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists, dicts and model outputs."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for element in value:
            yield from _tensors(element)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
