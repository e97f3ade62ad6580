"""What a probe found, as terminal text and as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.measure.probe.run import Probed, Row
from shardwise.spec.cluster import Cluster

WIDTH = 110
"""Columns of the table, however narrow the terminal says it is: figures that are cut off tell nothing."""


def print_probe(console: Console, cluster: Cluster, probed: Probed) -> None:
    """Print the best rate and the least time of every curve, and what is slow."""
    console.print(f"{cluster.name}: {probed.measured.source}, {probed.seconds:.0f} s", highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("what", no_wrap=True)
    for column in ("smallest", "it takes", "largest", "it takes", "rate", "spread"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in probed.rows:
        small, large = row.timings[0], row.timings[-1]
        table.add_row(
            row.what,
            _size(small.size, row.unit),
            _seconds(small.seconds),
            _size(large.size, row.unit),
            _seconds(large.seconds),
            _rate(large.size / large.seconds, row.unit),
            f"{(large.high - large.low) / large.seconds:.0%}",
        )
    console.width = max(console.width, WIDTH)
    console.print(table)
    for line in _single(probed):
        console.print(line, highlight=False)
    for text in (*probed.notes, *(finding.text for finding in probed.findings)):
        console.print(Text(f"warning: {text}", style="bold yellow"))


def probe_to_json(cluster: Cluster, probed: Probed) -> dict[str, Any]:
    """Return everything, with every size's median, least and most seconds."""
    return {
        "cluster": cluster.model_dump(mode="json"),
        "curves": [_row_to_json(row) for row in probed.rows],
        "findings": [
            {"what": found.subject, "ranks": list(found.ranks), "factor": found.factor, "text": found.text}
            for found in probed.findings
        ],
        "notes": list(probed.notes),
        "seconds": probed.seconds,
    }


def _row_to_json(row: Row) -> dict[str, Any]:
    points = [
        {"size": timing.size, "seconds": timing.seconds, "low": timing.low, "high": timing.high}
        for timing in row.timings
    ]
    return {"what": row.what, "unit": row.unit, "points": points}


def _single(probed: Probed) -> list[str]:
    """Say the figures that are no curves."""
    measured = probed.measured
    device = measured.device
    lines = [f"one operation on almost nothing: {_seconds(device.issue_s)} of the host"]
    if measured.collectives:
        lines.append(
            f"a collective under way: computing takes {device.slowdown:.2f} times as long, "
            f"starting one {_seconds(device.post_s)} of the host"
        )
        lines.append(f"one FSDP2 unit: {_seconds(device.unit_s)} of the host in each pass")
    else:
        lines.append("one rank: there is nothing to measure between ranks")
    if measured.host is not None:
        lines.append(f"Adam on the host: {_seconds(measured.host.adam_s * 1e6)} per million elements of one rank")
    return lines


def _seconds(seconds: float) -> str:
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def _size(size: float, unit: str) -> str:
    if unit == "FLOPs":
        return f"{_scaled(size, 1000, ('k', 'M', 'G', 'T'))}FLOP"
    return f"{_scaled(size, 1024, ('Ki', 'Mi', 'Gi'))}B"


def _scaled(size: float, step: float, units: tuple[str, ...]) -> str:
    value = size / step
    for unit in units[:-1]:
        if value < step:
            return f"{value:.3g} {unit}"
        value /= step
    return f"{value:.3g} {units[-1]}"


def _rate(rate: float, unit: str) -> str:
    if unit == "FLOPs":
        return f"{_scaled(rate, 1000, ('k', 'M', 'G', 'T'))}FLOP/s"
    return f"{_scaled(rate, 1000, ('k', 'M', 'G', 'T'))}B/s"
