"""What autograd keeps: tensors with a history, nodes, and regions whose saved tensors are made again."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.predict.blocks.storage import Storage


class Tensor:
    """A tensor: some elements of a storage, and the node that made it."""

    __slots__ = ("elements", "item", "node", "storage", "viewed")

    def __init__(
        self, storage: Storage, elements: int, item: int, node: Node | None = None, *, viewed: bool = False
    ) -> None:
        self.storage, self.elements, self.item = storage, elements, item
        self.node, self.viewed = node, viewed

    def view(self) -> Tensor:
        """Another look at it, without history."""
        return Tensor(self.storage, self.elements, self.item, viewed=True)

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.elements * self.item

    @property
    def needs_grad(self) -> bool:
        """Whether a gradient flows into it."""
        return self.node is not None


Grads = tuple[Tensor | None, ...]
Derivative = Callable[[Tensor, list[Tensor]], Grads]
"""From the gradient of a node's output and its saved tensors to the gradients of its inputs."""


class Node:
    """One operation in backward."""

    __slots__ = (
        "derivative",
        "fits",
        "grad",
        "inputs",
        "kind",
        "order",
        "pending",
        "saved",
        "seen",
        "sums_in_place",
        "times",
    )

    def __init__(self, order: int, inputs: tuple[Node | None, ...], derivative: Derivative, kind: int) -> None:
        self.order, self.inputs, self.derivative, self.kind = order, inputs, derivative, kind
        self.saved: list[Tensor | Handle] = []
        self.grad: Tensor | None = None
        self.pending = 0
        self.seen = False
        self.sums_in_place = True
        self.times = 1
        self.fits: tuple[tuple[int, int], ...] = ()


class Leaf(Node):
    """Where the gradient of a parameter, or of a block's input, arrives."""

    __slots__ = ("adds",)

    def __init__(self, kind: int, *, adds: bool = False) -> None:
        super().__init__(1 << 60, (), _nothing, kind)
        self.adds = adds

    def arrive(self) -> None:
        """Keep what has come, as what it is here, or add it to what is there."""
        if self.adds:
            self.grad = None
        elif self.grad is not None:
            self.grad.storage.turn(self.kind)


class Joint(Node):
    """The backward of an operation with several outputs."""

    __slots__ = ("parts",)

    def __init__(self, order: int, inputs: tuple[Node | None, ...], derivative: Derivative, kind: int) -> None:
        super().__init__(order, inputs, derivative, kind)
        self.parts: list[Tensor] = []


def _nothing(_: Tensor, __: list[Tensor]) -> Grads:
    return ()


class Handle:
    """The place of a saved tensor that a checkpointed region has let go."""

    __slots__ = ("place", "region")

    def __init__(self, region: Region, place: int) -> None:
        self.region, self.place = region, place


class Region:
    """A part of the program whose saved tensors are made again in backward."""

    __slots__ = ("again", "asked", "cache", "count", "output", "random", "reentrant", "run")

    def __init__(self, run: Callable[[], object], random: Tensor | None, reentrant: bool) -> None:
        self.run, self.random, self.reentrant = run, random, reentrant
        self.output: object = None
        self.count = self.asked = 0
        self.again: list[Tensor | None] | None = None
        self.cache: list[tuple[Tensor, ...]] = []


class AllThere(Exception):
    """The last tensor that a region saved has been made again."""


def count(root: Node) -> None:
    """Set of every node that leads to `root` how many gradients it waits for."""
    stack = [root]
    root.seen = True
    while stack:
        for target in stack.pop().inputs:
            if target is None:
                continue
            target.pending += 1
            if not target.seen:
                target.seen = True
                stack.append(target)
