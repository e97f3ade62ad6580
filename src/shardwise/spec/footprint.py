"""The Footprint: bytes per phase and category, where the peak is, and what the card and the host hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Phase = Literal["load", "forward", "backward", "optimizer_step", "evaluation", "save"]
PHASES: tuple[Phase, ...] = get_args(Phase)

Category = Literal[
    "sharded_parameters",
    "unsharded_parameters",
    "all_gather_buffers",
    "reduce_scatter_buffers",
    "unsharded_gradients",
    "sharded_gradients",
    "optimizer_states",
    "activations",
    "recomputed_activations",
    "logits_and_loss",
    "temporaries",
    "inputs",
    "buffers",
    "offloaded",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)
"""What a live byte is for. `offloaded` lies in host memory: it is listed, and not part of any total of the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Instant:
    """The live bytes of rank 0, the rank with the largest shards, at one instant."""

    phase: Phase
    """Phase of the step."""
    where: str
    """Unit at work, such as `model.layers.31`, `loss`, `root`, `optimizer`."""
    live: Mapping[Category, int]
    """Bytes by category; those that are not named are 0."""

    @property
    def allocated(self) -> int:
        """Bytes of the device's memory that tensors occupy."""
        return sum(size for category, size in self.live.items() if category != "offloaded")


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestBuffer:
    """The largest contiguous piece of memory."""

    bytes: int
    """Its size."""
    category: Category
    """What it is for."""
    where: str
    """Unit that needs it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """An estimate in bytes with the range in which nine of ten cases should fall."""

    low: int
    """Lower end."""
    value: int
    """Best guess."""
    high: int
    """Upper end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One summand of a figure, with where it comes from."""

    name: str
    """What it is."""
    bytes: int
    """Its size; may be 0."""
    source: str
    """Where the figure comes from: `measured`, `traced`, `estimated`, `catalogue`, and by what."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """What the card shows, beyond what tensors occupy."""

    reserved: Interval
    """Memory that the caching allocator holds (`torch.cuda.max_memory_reserved`)."""
    total: Interval
    """What nvidia-smi shows for the process: reserved, context and communicators; at best the whole card."""
    needed: Interval
    """What there has to be: before it fails, the allocator gives back what it holds without use and tries again, so
    this is less than `total`."""
    terms: tuple[Term, ...]
    """The summands of `total`."""
    limit: int | None
    """Bytes of the card that a program can use; None where the cluster has no cards."""

    @property
    def fits(self) -> bool | None:
        """Whether the best guess of what is needed is within the limit; None without a limit."""
        return None if self.limit is None else self.needed.value <= self.limit

    @property
    def tight(self) -> bool | None:
        """Whether it fits only because the allocator gives memory back and tries again, which takes time."""
        return None if self.limit is None else self.fits is True and self.total.value >= self.limit


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Memory of one node."""

    loading: int
    """Bytes at the peak of loading, all ranks of the node together."""
    training: int
    """Bytes while training, saving checkpoints included."""
    terms: tuple[Term, ...]
    """The summands of all three; each is named `<which>: <what>`."""
    limit: int | None
    """Memory of a node; None where it is not known."""
    exporting: int = 0
    """Bytes on the first node at the end, when rank 0 gathers the model for its export; 0: not looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Memory of one rank over a training step."""

    peaks: tuple[Instant, ...]
    """The highest instant of each phase that was looked at, in the order of PHASES."""
    largest_buffer: LargestBuffer
    """The largest contiguous buffer of the step."""
    device: DeviceMemory | None = None
    """What the card shows; None on CPUs."""
    host: HostMemory | None = None
    """Host memory; None where it was not looked at."""

    @property
    def peak(self) -> Instant:
        """The highest instant of all."""
        return max(self.peaks, key=lambda instant: instant.allocated)

    def of_phase(self, phase: Phase) -> Instant | None:
        """Return the highest instant of a phase; None when it was not looked at."""
        return next((instant for instant in self.peaks if instant.phase == phase), None)
