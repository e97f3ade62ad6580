"""The dtype ledger: in which dtype every role of a live run really is, beside what was planned."""

from __future__ import annotations

from shardwise.spec.strict import NotNegative, Strict


class LedgerRow(Strict):
    """One role of the ledger, on one rank."""

    role: str
    """What it is, such as `gradients`."""
    planned: str
    """Dtype that the plan says; `as loaded` where it says none."""
    live: tuple[str, ...]
    """Dtypes that were read back, sorted."""
    bytes: NotNegative | None = None
    """Bytes on this rank, where it is stored; None where it only passes by."""

    @property
    def honoured(self) -> bool:
        """Whether the live dtype is the planned one and no other."""
        return self.planned == "as loaded" or not self.live or self.live == (self.planned,)


class DtypeLedger(Strict):
    """All roles, in the order in which a step meets them."""

    rows: tuple[LedgerRow, ...]
    """One row per role that the run has."""

    def differences(self) -> tuple[str, ...]:
        """Return one line per role that is not as planned."""
        return tuple(
            f"dtype of {row.role} is {' and '.join(row.live)}, planned {row.planned}"
            for row in self.rows
            if not row.honoured
        )
