"""What is alive: the storages that are known, what each is for, and which unit is at work."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from shardwise.engine.compat_memory import is_fake, plain_tensors
from shardwise.measure.storage_log import Key, Piece, StorageLog
from shardwise.spec.footprint import Category, Phase

LOSS = "loss"
"""Unit at work from the head's call to the loss, and in backward until the gradient of the head's input is there."""


class StorageBook:
    """Pieces by storage, and the place in the step."""

    def __init__(self, device_type: str = "cpu") -> None:
        self.device_type = device_type
        """Kind of device whose memory is followed; storages elsewhere count only as `offloaded`."""
        self.log = StorageLog()
        """What happened."""
        self.key = Key(step=0, phase="forward", micro_batch=0, where="root")
        """What is at work."""
        self.counts_fakes = False
        """Fake tensors are the ones to count: a FakeTensorMode is around."""
        self._known: dict[int, tuple[Piece, weakref.ref[torch.UntypedStorage]]] = {}
        self._given: list[Category] = []
        self._born: list[Piece] = []
        self._recomputed: list[Piece] | None = None
        self._ended: list[Piece] | None = None
        self.log.mark(self.key)

    def move(
        self,
        *,
        phase: Phase | None = None,
        where: str | None = None,
        step: int | None = None,
        micro_batch: int | None = None,
    ) -> None:
        """Go to another place in the step; what outlives a unit's forward is an activation from then on."""
        now = self.key
        key = Key(
            step=now.step if step is None else step,
            phase=phase or now.phase,
            micro_batch=now.micro_batch if micro_batch is None else micro_batch,
            where=where or now.where,
        )
        if key == now:
            return
        if now.phase == "forward":
            self._become(self._born, "activations")
        self._born = []
        self.key = key
        self.log.mark(key)

    def see(self, tensor: torch.Tensor, operator: object) -> None:
        """Take note of an operator's result."""
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            self._see(tensor, operator)
            return
        for part in plain_tensors(tensor):
            self._see(part, operator)

    def _see(self, tensor: torch.Tensor, operator: object) -> None:
        if tensor.device.type != self.device_type or (is_fake(tensor) and not self.counts_fakes):
            return
        storage = tensor.untyped_storage()
        known = self._known.get(id(storage))
        if known is not None:
            self.log.resize(known[0], storage.nbytes())
            return
        if not self.counts_fakes and not storage.resizable():
            return
        piece = self._enter(storage, self._category_at_birth(), operator)
        self._born.append(piece)
        if self._recomputed is not None:
            self._recomputed.append(piece)

    def _enter(self, storage: torch.UntypedStorage, category: Category, operator: object) -> Piece:
        piece = Piece(category, self.key.where, operator)
        place = id(storage)

        def died(_: object) -> None:
            gone = self._known.pop(place, None)
            if gone is not None:
                self.log.resize(gone[0], 0)

        self._known[place] = (piece, weakref.ref(storage, died))
        self.log.resize(piece, storage.nbytes())
        return piece

    def _category_at_birth(self) -> Category:
        if self._given:
            return self._given[-1]
        return "logits_and_loss" if self.key.where == LOSS else "temporaries"

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Take note of a storage's new size."""
        known = self._known.get(id(storage))
        if known is not None:
            self.log.resize(known[0], storage.nbytes())

    def add(self, tensors: Iterable[torch.Tensor], category: Category) -> None:
        """Say what tensors are for, since their births; those that are not known are taken in."""
        for storage in self._storages(tensors, category):
            known = self._known.get(id(storage))
            if known is None:
                self._enter(storage, category, "registered")
            else:
                known[0].category = category

    def turn(self, tensors: Iterable[torch.Tensor], category: Category) -> None:
        """Say what tensors are for from now on; what they were for before stays so."""
        for storage in self._storages(tensors, category):
            known = self._known.get(id(storage))
            if known is None:
                self._enter(storage, category, "registered")
            elif known[0].category != category:
                before, death = known
                after = Piece(category, before.where, before.operator)
                self._known[id(storage)] = (after, death)
                size = before.bytes
                self.log.resize(before, 0)
                self.log.resize(after, size)

    def _storages(self, tensors: Iterable[torch.Tensor], category: Category) -> Iterator[torch.UntypedStorage]:
        for tensor in tensors:
            for part in plain_tensors(tensor):
                here = part.device.type == self.device_type or (category == "offloaded" and not part.is_meta)
                if here and (self.counts_fakes or not is_fake(part)):
                    yield part.untyped_storage()

    @contextmanager
    def births(self, category: Category) -> Iterator[None]:
        """Storages that are born inside are for `category`."""
        self._given.append(category)
        try:
            yield
        finally:
            self._given.pop()

    def stand_in(self, size: int, category: Category, name: str) -> Piece:
        """Add memory without a tensor; it lives until `drop`."""
        piece = Piece(category, self.key.where, name)
        self.log.resize(piece, size)
        return piece

    def drop(self, piece: Piece) -> None:
        """End the life of a `stand_in`."""
        self.log.resize(piece, 0)

    def begin_recompute(self) -> None:
        """A block is computed again from here."""
        self.settle()
        self._recomputed = []

    def end_recompute(self) -> None:
        """It is done. Frames of a recompute that stopped early still hold what they worked on, so `settle` later."""
        self._ended, self._recomputed = self._recomputed, None

    def settle(self) -> None:
        """At the next operator: what is left of a recompute is there for backward."""
        if self._ended is not None:
            self._become(self._ended, "recomputed_activations")
            self._ended = None

    @staticmethod
    def _become(pieces: Iterable[Piece], category: Category) -> None:
        for piece in pieces:
            if piece.bytes and piece.category == "temporaries":
                piece.category = category

    def close(self) -> None:
        """Forget all storages, without ending their lives in the log."""
        self._known.clear()
