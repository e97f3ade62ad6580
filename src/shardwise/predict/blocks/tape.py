"""A model of autograd's memory: storages that live as long as something refers to them, and a backward over a tape.

The programs of `predict.blocks` are written like the model code they stand for. A tensor here is a size and a storage;
Python's own reference counts free it, as they do in torch: local variables, arguments of calls that are not over,
what autograd saves, gradients that wait in front of a node. So walking a program forward and backward gives the live
bytes at every instant, without torch and without numbers in tensors.

The engine follows torch's: of the nodes that are ready, the one made last goes first; gradients of parameters are
taken at once; two gradients that meet are added in place when nothing else refers to the first.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from shardwise.predict.blocks.graph import (
    AllThere,
    Derivative,
    Grads,
    Handle,
    Joint,
    Leaf,
    Node,
    Region,
    Tensor,
    count,
)
from shardwise.predict.blocks.record import Phases
from shardwise.predict.blocks.storage import (
    ACTIVATION,
    GRADIENT,
    LOGITS,
    RECOMPUTED,
    TEMPORARY,
    UNCOUNTED,
    Memory,
    Storage,
)
from shardwise.predict.work import AttentionWork
from shardwise.spec.speeds import TimedKind

__all__ = [
    "ACTIVATION",
    "GRADIENT",
    "LOGITS",
    "RECOMPUTED",
    "TEMPORARY",
    "UNCOUNTED",
    "Grads",
    "Leaf",
    "Memory",
    "Node",
    "Storage",
    "Tape",
    "Tensor",
]

_RANDOM_STATE = 5056
"""Bytes of the state of torch's generator for CPUs."""


class Tape:
    """The state of one walk: memory, the order of nodes, what happens to saved tensors, and what is done.

    `times`: how many equal parts of the program the one at work stands for. They count as work, not as memory.
    """

    def __init__(self, memory: Memory, *, recording: bool = True, sums_in_place: bool = True) -> None:
        self.memory = memory
        self.recording = recording
        self.sums_in_place = sums_in_place
        self.kind = TEMPORARY
        self.distributed = False
        self.adds_gradients = False
        self.stays = 0
        self.region: Region | None = None
        self.keeps: Callable[[str, int, int], bool] | None = None
        self.times = 1
        self.phases = Phases()
        self.doing = self.phases.forward
        self._order = 0

    def new(
        self,
        elements: int,
        item: int,
        node: Node | None = None,
        kind: int | None = None,
        *,
        reads: int | None = None,
    ) -> Tensor:
        """Allocate a tensor of `elements` of `item` bytes, made by `node`.

        `reads`: it is written by a pointwise operation or a reduction that reads so many bytes; None: by none, or by
        one that is counted otherwise.
        """
        if reads is not None:
            moves, moved = self.doing.moves, reads + elements * item
            moves[moved] = moves.get(moved, 0) + self.times
        kind = self.kind if kind is None else kind
        return Tensor(Storage(self.memory, elements * item, kind), elements, item, node)

    def move(self, size: int) -> None:
        """Count a pointwise operation, reduction or copy that reads and writes `size` bytes."""
        moves = self.doing.moves
        moves[size] = moves.get(size, 0) + self.times

    def product(self, rows: int, inner: int, columns: int, item: int, batch: int = 1) -> None:
        """Count a matrix product."""
        products, sizes = self.doing.products, (rows, inner, columns, item, batch)
        products[sizes] = products.get(sizes, 0) + self.times

    def attend(self, call: AttentionWork) -> None:
        """Count a call of an attention kernel."""
        attention = self.doing.attention
        attention[call] = attention.get(call, 0) + self.times

    def exchange(self, kind: TimedKind, size: int) -> None:
        """Count a collective over the tensor axis, of a payload of `size` bytes."""
        exchanges = self.doing.exchanges
        exchanges[kind, size] = exchanges.get((kind, size), 0) + self.times

    def gradient(self, weight: Node | None, elements: int, item: int, *, reads: int | None = None) -> Tensor:
        """Allocate the gradient of a weight: as such from its birth, unless it is still to be added to others."""
        own = isinstance(weight, Leaf) and weight.pending == 1 and weight.grad is None and not weight.adds
        return self.new(elements, item, kind=GRADIENT if own else None, reads=reads)

    def parameter(self, elements: int, item: int, *, trains: bool) -> Tensor:
        """Return a parameter, whose bytes are not counted here; its gradient's are."""
        node = Leaf(GRADIENT, adds=self.adds_gradients) if trains else None
        return Tensor(Storage(self.memory, 0, UNCOUNTED), elements, item, node)

    def node(self, inputs: tuple[Tensor, ...], derivative: Derivative) -> Node | None:
        """Return the backward of an operation on `inputs`; None where no gradient flows."""
        if not self.recording:
            return None
        nodes = tuple(tensor.node for tensor in inputs)
        if not any(nodes):
            return None
        self._order += 1
        made = Node(self._order, nodes, derivative, self.kind)
        made.times = self.times
        made.sums_in_place = self.sums_in_place and not self.distributed
        return made

    def joint(self, inputs: tuple[Tensor, ...], derivative: Derivative) -> Joint | None:
        """The same for an operation with several outputs, whose gradients wait beside each other."""
        nodes = tuple(tensor.node for tensor in inputs)
        if not self.recording or not any(nodes):
            return None
        self._order += 1
        return Joint(self._order, nodes, derivative, self.kind)

    def save(self, node: Node | None, *tensors: Tensor) -> None:
        """Let `node` keep tensors until its backward."""
        if node is None:
            return
        region = self.region
        for tensor in tensors:
            storage = tensor.storage
            if region is None:
                storage.save(ACTIVATION)
                node.saved.append(Tensor(storage, tensor.elements, tensor.item))
            elif region.again is None:
                node.saved.append(Handle(region, region.count))
                region.count += 1
            else:
                storage.save(RECOMPUTED)
                region.again.append(Tensor(storage, tensor.elements, tensor.item))
                if len(region.again) == region.count and not region.reentrant:
                    raise AllThere

    def keep(self, name: str, inner: int, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Run an operation that selective checkpointing may keep: `make` it, or take what forward has kept.

        Args:
            name: `matmul` or `attention`.
            inner: Inner dimension of a matrix product.
            make: Makes its outputs.
        """
        region = self.region
        if region is None or self.keeps is None:
            return make()
        region.asked += 1
        if not self.keeps(name, inner, region.asked):
            return make()
        if region.again is not None:
            return region.cache.pop(0)
        outputs = make()
        for output in outputs:
            output.storage.save(ACTIVATION)
            self.stays += output.storage.size
        region.cache.append(tuple(Tensor(out.storage, out.elements, out.item) for out in outputs))
        return outputs

    def checkpointed(self, run: Callable[[], Tensor], device: str, *, reentrant: bool = False) -> Tensor:
        """Run a part of the program that keeps nothing but its inputs, and runs again in backward.

        Its random numbers are drawn again: the state of a CPU's generator is kept for that, on the host. Reentrant, it
        runs to its end, and its output lives as long as anything that it made again.
        """
        random = self.new(_RANDOM_STATE, 1, kind=ACTIVATION) if device == "cpu" and self.recording else None
        self.region = Region(run, random, reentrant)
        try:
            return run()
        finally:
            self.region = None

    def backward(self, root: Node, elements: int, item: int) -> None:
        """Send a gradient of `elements` of `item` bytes back from `root` through everything that leads to it."""
        self.doing = self.phases.backward
        count(root)
        root.grad = self.new(elements, item)
        root.grad.storage.waiting = 1
        ready: list[tuple[int, int, Node]] = [(-root.order, 0, root)]
        pushed = 0
        while ready:
            node = heappop(ready)[2]
            if isinstance(node, Leaf):
                if node.adds and node.grad is not None:
                    self.move(3 * node.grad.elements * node.grad.item)
                node.arrive()
                continue
            outputs = self._run(node)
            for made in outputs:
                if made is not None:
                    made.storage.waiting += 1
            for place, target in enumerate(node.inputs):
                if target is None:
                    continue
                made = outputs[place]
                outputs[place] = None
                if made is not None:
                    self._add(target, made)
                target.pending -= 1
                if not target.pending and target.grad is not None:
                    pushed += 1
                    heappush(ready, (-target.order, pushed, target))
            del made

    def _run(self, node: Node) -> list[Tensor | None]:
        """Return the gradients of a node's inputs; what it has saved is let go.

        They are made to fit their inputs when the node itself is done; until after that autograd holds the gradient
        that came and what the node has saved, but not what was made again.
        """
        grad, node.grad = node.grad, None
        assert grad is not None
        grad.storage.waiting -= 1
        self.times = node.times
        saved = [self._unpack(one) for one in node.saved]
        self.kind = node.kind
        outputs = list(node.derivative(grad, saved))
        saved.clear()
        if isinstance(node, Joint):
            node.parts.clear()
        for place, (elements, item) in enumerate(node.fits):
            made = outputs[place]
            if made is not None and made.elements != elements:
                outputs[place] = made = self.new(elements, made.item, reads=made.elements * made.item)
            if made is not None and made.item != item:
                outputs[place] = self.new(elements, item, reads=elements * made.item)
            made = None
        node.saved.clear()
        return outputs

    def _unpack(self, saved: Tensor | Handle) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        region = saved.region
        if region.again is None:
            self._run_again(region)
        assert region.again is not None
        tensor = region.again[saved.place]
        region.again[saved.place] = None
        assert tensor is not None
        return tensor

    def _run_again(self, region: Region) -> None:
        region.again = []
        region.asked = 0
        before, self.region = self.region, region
        doing, self.doing = self.doing, self.phases.again
        try:
            output = region.run()
            if region.reentrant and isinstance(output, Tensor):
                output.storage.save(RECOMPUTED)
                region.output = Tensor(output.storage, output.elements, output.item)
        except AllThere:
            pass
        finally:
            self.region, self.doing = before, doing

    def _add(self, target: Node, made: Tensor) -> None:
        """Let a gradient wait in front of its node; two that meet there are added."""
        waiting = target.grad
        if isinstance(target, Joint):
            target.parts.append(made)
            waiting = None
        if waiting is None:
            target.grad = made
            return
        made.storage.waiting -= 1
        self.move((2 * waiting.item + made.item) * waiting.elements)
        if waiting.storage.waiting == 1 and not waiting.viewed and target.sums_in_place:
            return
        waiting.storage.waiting -= 1
        last = isinstance(target, Leaf) and target.pending == 1
        target.grad = self.new(waiting.elements, waiting.item, kind=target.kind if last else None)
        target.grad.storage.waiting = 1
