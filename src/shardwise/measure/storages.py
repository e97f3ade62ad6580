"""Every storage of a training step from birth to death, by category, phase and unit: in real runs and in fake ones.

    with StorageTracker(model, optimizer) as tracker:
        tracker.add(batch_tensors, "inputs")
        training_step(...)
    for segment in tracker.segments():        # in time order: (step, phase, micro-batch, unit) with live bytes
        print(segment.key, segment.start, segment.peak, segment.end)
    peaks(tracker.segments())                 # the highest Instant of each phase
    tracker.largest()                         # the largest contiguous buffer

Loading and saving, whose model is not known beforehand or which no hook shows:

    with StorageTracker() as tracker:
        with tracker.phase("load"):
            model = load_model(...)
        tracker.watch(model)                  # names the pieces, installs hooks
        tracker.watch_optimizer(optimizer)

What makes storages that belong to something special says so: `with tracker.births("offloaded"): ...`,
`tracker.add(tensors, category)` (what they are for, since their birth), `tracker.turn(tensors, category)` (from now
on). `tracker.stand_in(bytes, category, "name")` adds memory that a kernel of another device would take: a piece
without a tensor, alive until `tracker.drop(piece)`.

**What is seen.** A dispatch mode sees every storage that comes out of an operator; a weak reference on the storage
tells its death; `UntypedStorage.resize_`, by which FSDP2 frees and takes memory, is watched. Views and operations in
place make no new bytes. Tensor subclasses of several storages are taken apart. What does not count: meta tensors; the
tensors of the global shape by which DTensor finds out shapes, real or fake; memory that torch did not allocate, such as
mapped files; storages of another kind of device than `device_type`, unless they are `offloaded`. What a kernel takes
for itself is not seen. Sums that autograd makes in place, and under a dispatch mode would not, stay in place
(`gradient_sums`).

**Categories.** A storage has one category from its birth to its death, found out by the time it dies; only `turn`
changes it in between. In the order of precedence:

- `sharded_parameters`, `buffers`, `optimizer_states`: what model and optimizer hold; `offloaded` where the plan keeps
  them on the host.
- `inputs`: what was added so, and what the root module is called with.
- `sharded_gradients`: `.grad` of the sharded parameters, and sums that wait for their reduction over replicas.
- `unsharded_gradients`: `.grad` of gathered parameters, from the matrix product that makes it to the reduction; also
  what is added up on every rank where reductions are deferred.
- `all_gather_buffers`: all that is made to gather a unit, its casted shard included. `unsharded_parameters`: where
  the gathered weights are copied to and used, and the part that stays after forward where units reshard to fewer ranks.
- `reduce_scatter_buffers`: all that is made to reduce a unit.
- `logits_and_loss`: born while the loss is at work: from the head's call to the end of forward, and in backward until
  the gradient of the head's input is there (that gradient itself is a temporary).
- `activations`: born in the forward of a unit (block, embedding, root) and alive when that unit's turn ends.
- `recomputed_activations`: the same in a block that is computed again in backward.
- `temporaries`: everything else, such as gradients of activations.

**Segments.** The turn of a unit begins with its forward, its gather included, or with the gradient of its output, and
ends with the next unit's. `root` is what is in no block: rotary tables, masks, final norm; and the embedding where it
is no unit of its own. The reduction of a unit is in that unit's segment. `gradients` is what is done between backward
and optimizer (sums of micro-batches, clipping), in phase backward.

Phases are found by hooks: a root forward (`evaluation` without gradients), autograd at work, the optimizer's step.
Everything is taken out again at exit. Operators in torch.compile'd code, and threads of the caller, are not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.engine.compat import TorchDispatchMode
from shardwise.engine.compat_memory import fakes_are_ambient, is_wrapper, watch_propagation, watch_resizes
from shardwise.measure.gradient_sums import IN_PLACE, GradientSums
from shardwise.measure.landmarks import Landmarks
from shardwise.measure.storage_book import StorageBook
from shardwise.measure.storage_log import Key, Piece, Segment, StorageLog, peaks
from shardwise.spec.footprint import Category, LargestBuffer, Phase

__all__ = ["Key", "Piece", "Segment", "StorageLog", "StorageTracker", "peaks"]


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context manager that follows the storages of what runs inside it, once; nothing stays installed."""

    supports_higher_order_operators = True
    """Recomputed blocks are one operator of torch.compile's."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile inside."""
        return True

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        device_type: str = "cpu",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = (model, optimizer)
        self._book = StorageBook(device_type)
        self._landmarks = Landmarks(self._book)
        self._stack = ExitStack()
        self._sums = GradientSums()
        self._blind = 0

    def __enter__(self) -> StorageTracker:
        with ExitStack() as stack:
            self._book.counts_fakes = fakes_are_ambient()
            stack.enter_context(watch_resizes(self._book.resized))
            stack.enter_context(watch_propagation(self._unseen))
            stack.callback(self._book.close)
            stack.callback(self._landmarks.close)
            model, optimizer = self._given
            if model is not None:
                self.watch(model)
            if optimizer is not None:
                self.watch_optimizer(optimizer)
            super().__enter__()  # type: ignore[no-untyped-call]
            stack.push(super().__exit__)
            with self._unseen():
                self._sums.learn()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *args: object) -> None:
        self._stack.close()

    @property
    def log(self) -> StorageLog:
        """What happened to storages, in order."""
        return self._book.log

    def segments(self) -> list[Segment]:
        """Return what was at work, in order, with live bytes by category."""
        return self._book.log.segments()

    def largest(self) -> LargestBuffer | None:
        """Return the largest contiguous buffer so far."""
        return self._book.log.largest()

    def watch(self, model: nn.Module) -> None:
        """Register a model's parameters, gradients and buffers, and hook it; it must be sharded already.

        Raises:
            BadInput: a model without blocks.
        """
        self._landmarks.watch_model(model)

    def watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Register an optimizer's states, and hook its steps."""
        self._landmarks.watch_optimizer(optimizer)

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """What runs inside belongs to this phase, whatever hooks say."""
        before, self._landmarks.pinned = self._book.key, True
        self._book.move(phase=phase, where="root")
        try:
            yield
        finally:
            self._landmarks.pinned = False
            self._book.move(phase=before.phase, where=before.where)

    def add(self, tensors: Iterable[torch.Tensor], category: Category) -> None:
        """Say what tensors are for, since their births; those not known are taken in."""
        self._book.add(tensors, category)

    def turn(self, tensors: Iterable[torch.Tensor], category: Category) -> None:
        """Say what tensors are for from now on."""
        self._book.turn(tensors, category)

    def births(self, category: Category) -> AbstractContextManager[None]:
        """Storages that are born inside are for `category`."""
        return self._book.births(category)

    def stand_in(self, size: int, category: Category, name: str) -> Piece:
        """Add `size` bytes without a tensor, alive until `drop`; for memory that a kernel elsewhere would take."""
        return self._book.stand_in(size, category, name)

    def drop(self, piece: Piece) -> None:
        """End the life of a `stand_in`."""
        self._book.drop(piece)

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        self._blind += 1
        try:
            yield
        finally:
            self._blind -= 1

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and note the storages of its results; tensor subclasses take theirs apart first."""
        for kind in types:
            if is_wrapper(kind):
                return NotImplemented
        watched = not self._blind
        if watched:
            self._landmarks.look()
        if (watched or self._sums.learning) and func in IN_PLACE and self._sums.in_place(func, args, kwargs):
            return IN_PLACE[func](*args)
        result = func(*args, **(kwargs or {}))
        if watched:
            self._see(result, func)
        return result

    def _see(self, result: object, operator: object) -> None:
        if isinstance(result, torch.Tensor):
            self._book.see(result, operator)
        elif isinstance(result, tuple | list):
            for part in result:
                self._see(part, operator)
