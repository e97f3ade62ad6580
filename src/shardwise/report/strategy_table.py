"""The article's table: what each strategy stores on one rank, as terminal text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from shardwise.report.footprint_words import Unit, unit_for
from shardwise.spec.footprint import Category, Footprint, Instant
from shardwise.spec.layout import StrategyName
from shardwise.spec.plan import Plan
from shardwise.spec.report import Instrument

ARTICLE: dict[StrategyName, str] = {
    "NO_SHARD": "DDP",
    "SHARD_GRAD_OP": "ZeRO-2",
    "FULL_SHARD": "FSDP / ZeRO-3",
    "HYBRID_SHARD": "hybrid",
}
"""Strategy -> its column in the article (which has no hybrid)."""

_COLUMNS = {
    "parameters": 14,
    "gradients": 14,
    "optimizer": 14,
    "gathered": 8,
    "reduced": 8,
    "computed": 8,
    "peak": 8,
}
"""Head -> width."""

NOTES = (
    "parameters, gradients, optimizer: what rests on the rank when the optimizer steps, and its share of the whole",
    "gathered, reduced, computed: at the peak of backward, weights in use, gradients under way, activations and logits",
    "DDP: NO_SHARD of FSDP2. torch's DDP has no working copy of the weights (autocast casts them one by one), and its"
    " buckets hold all gradients once more unless gradient_as_bucket_view is set",
    "ZeRO-2: SHARD_GRAD_OP of FSDP2, which unlike ZeRO-2 shards weights too, from backward to the next forward",
)
"""What a reader of the table has to know."""

_COMPUTED: tuple[Category, ...] = ("activations", "recomputed_activations", "logits_and_loss")
_GATHERED: tuple[Category, ...] = ("unsharded_parameters", "all_gather_buffers")
_REDUCED: tuple[Category, ...] = ("unsharded_gradients", "reduce_scatter_buffers")


@dataclass(frozen=True, kw_only=True)
class StoredBytes:
    """What one instrument says of one strategy, in bytes on one rank."""

    parameters: int
    """Weights at rest."""
    gradients: int
    """Gradients when the optimizer steps."""
    optimizer_states: int
    """Optimizer states."""
    gathered: int
    """Gathered weights and the buffers that gather them, at the peak of backward."""
    reduced: int
    """Gradients of units that are not reduced yet and the buffers that reduce them, at the peak of backward."""
    computed: int
    """Activations, logits and loss, at the peak of backward."""
    peak: int
    """Live tensors at the highest instant of all."""
    where: str
    """Unit at work then."""


@dataclass(frozen=True, kw_only=True)
class StrategyRow:
    """One strategy on the world that was asked for."""

    title: str
    """The article's name."""
    plan: Plan
    """What it is here."""
    share: float
    """Share of the sharded state that one rank holds: 1 / ranks that share it."""
    by: Mapping[Instrument, StoredBytes]
    """Instrument -> its figures."""


def stored_bytes(footprint: Footprint) -> StoredBytes:
    """Read a row's figures from a footprint."""
    rest = footprint.of_phase("optimizer_step")
    backward = footprint.of_phase("backward")
    assert rest is not None
    assert backward is not None
    return StoredBytes(
        parameters=_sum(rest, ("sharded_parameters",)),
        gradients=_sum(rest, ("sharded_gradients",)),
        optimizer_states=_sum(rest, ("optimizer_states",)),
        gathered=_sum(backward, _GATHERED),
        reduced=_sum(backward, _REDUCED),
        computed=_sum(backward, _COMPUTED),
        peak=footprint.peak.allocated,
        where=footprint.peak.where,
    )


def _sum(instant: Instant, categories: tuple[Category, ...]) -> int:
    return sum(instant.live.get(category, 0) for category in categories)


def rows_to_json(rows: Sequence[StrategyRow]) -> dict[str, Any]:
    """Return the table as JSON; `docs/plan.md` documents the schema."""
    return {
        "rows": [
            {
                "title": row.title,
                "strategy": row.plan.strategy,
                "mesh": row.plan.mesh.model_dump(mode="json"),
                "share": row.share,
                "by": {name: asdict(found) for name, found in row.by.items()},
            }
            for row in rows
        ]
    }


def print_strategies(console: Console, rows: Sequence[StrategyRow]) -> None:
    """Print the table: a line per strategy and instrument, on one rank."""
    unit = unit_for(max(found.peak for row in rows for found in row.by.values()))
    names = [_name(row) for row in rows]
    width = max(len(name) for name in [*names, f"{unit.name} on one rank"])
    several = len(rows[0].by) > 1
    blank = " " * (10 if several else 0)
    heads = "".join(f"  {head:>{cells}}" for head, cells in _COLUMNS.items())
    _line(console, f"{f'{unit.name} on one rank':<{width}}{blank}{heads}", "bold")
    for name, row in zip(names, rows, strict=True):
        for number, (instrument, found) in enumerate(row.by.items()):
            label = f"{name if number == 0 else '':<{width}}" + (f"  {instrument:<8}" if several else "")
            cells = zip(table_cells(row, found, unit), _COLUMNS.values(), strict=True)
            _line(console, label + "".join(f"  {cell:>{size}}" for cell, size in cells))
    console.print()
    for note in NOTES:
        _line(console, note, "dim")


def _name(row: StrategyRow) -> str:
    mesh = row.plan.mesh
    size = f"{mesh.replicate} x {mesh.shard}" if mesh.replicate > 1 and mesh.shard > 1 else str(mesh.data_ranks)
    tensor = f" x tensor {mesh.tensor}" if mesh.tensor > 1 else ""
    return f"{row.title} = {row.plan.strategy} {size}{tensor}"


def table_cells(row: StrategyRow, found: StoredBytes, unit: Unit) -> list[str]:
    """Return a row's figures in the order of the table's columns; what is sharded with its share."""
    share = f"1/{round(1 / row.share)}" if row.share < 1 else "1"
    rest = [f"{unit.of(size)} ({share})" for size in (found.parameters, found.gradients, found.optimizer_states)]
    return [*rest, *(unit.of(size) for size in (found.gathered, found.reduced, found.computed, found.peak))]


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(f"  {text}", style), soft_wrap=True, highlight=False)
