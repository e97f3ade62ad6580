"""What the first step of a run did, for people."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.report.terminal import bytes_text
from shardwise.spec.collectives import Collectives
from shardwise.spec.ledger import DtypeLedger


def first_step_lines(collectives: Collectives, dtypes: DtypeLedger, *, compared: bool) -> Iterator[str]:
    """Yield lines: collectives by kind and axis, and the dtype ledger; both were found to be as planned.

    Args:
        collectives: Counted.
        dtypes: Read back.
        compared: Those of the tensor axis were compared with a formula too.
    """
    yield "first step, read back on rank 0 and as planned:"
    if not compared:
        yield "  (over the tensor axis counted only: there is no formula for this model's exchanges there)"
    for total in collectives.totals:
        yield f"  {total.kind} over {total.axis}: {total.count} calls, {bytes_text(total.bytes)}"
    width = max(len(row.role) for row in dtypes.rows)
    for row in dtypes.rows:
        size = "" if row.bytes is None else f"  {bytes_text(row.bytes)}"
        yield f"  {row.role:<{width}}  {' + '.join(row.live)}{size}"
