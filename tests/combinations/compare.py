"""How far a live run may be from one process, by what rounds in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from combinations.features import Row
from combinations.live import Tensors, Trained


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Bounds on what three steps may differ by, all relative."""

    loss: float
    """Each step's loss."""
    norm: float
    """Each step's gradient norm before clipping."""
    gradient: float
    """Each gradient of the last step: norm of the difference / its norm (a thousandth of all gradients' at least)."""
    moved: float
    """What all weights moved in three steps: norm of the difference / norm."""

    def widened(self, other: Tolerance) -> Tolerance:
        """Return the larger of each bound."""
        return Tolerance(
            loss=max(self.loss, other.loss),
            norm=max(self.norm, other.norm),
            gradient=max(self.gradient, other.gradient),
            moved=max(self.moved, other.moved),
        )


PRECISION = {
    "fp32": Tolerance(loss=1e-6, norm=1e-6, gradient=1e-5, moved=1e-5),
    "fp16": Tolerance(loss=1e-3, norm=2e-3, gradient=2e-2, moved=3e-2),
    "bf16": Tolerance(loss=1e-2, norm=3e-2, gradient=0.15, moved=0.2),
    "bf16 reduced": Tolerance(loss=1e-2, norm=3e-2, gradient=0.15, moved=0.2),
    "bf16 stored": Tolerance(loss=1e-2, norm=3e-2, gradient=0.15, moved=0.25),
}
"""By precision. Orders of sums differ in fp32; the others keep 11 or 8 bits of what the reference keeps 24 of."""

OPTIMIZER = {
    "bf16 states": Tolerance(loss=1e-6, norm=1e-6, gradient=1e-4, moved=2e-4),
    "8-bit": Tolerance(loss=1e-5, norm=2e-4, gradient=1e-2, moved=3e-2),
}
"""By optimizer, where it rounds too: a last bit of a gradient may turn a rounding of a state, and shards are other
blocks of 256 than whole weights."""


def tolerance_of(row: Row) -> Tolerance:
    """Return the bounds of a row."""
    bounds = PRECISION[row["precision"]]
    return bounds.widened(OPTIMIZER[row["optimizer"]]) if row["optimizer"] in OPTIMIZER else bounds


def differences(live: list[Trained], alone: Trained, bounds: Tolerance) -> list[str]:
    """Return, in words, everything by which live ranks differ from one process or from each other."""
    first = live[0]
    if first.gradients.keys() != alone.gradients.keys() or first.end.keys() != alone.end.keys():
        return [f"other weights or gradients: {sorted(first.gradients.keys() ^ alone.gradients.keys())}"]
    found = [
        f"{name} differs between ranks"
        for name in first.end
        if not all(torch.equal(first.end[name], other.end[name]) for other in live)
    ]
    measured: list[tuple[str, float, float]] = []
    for step, pairs in enumerate(zip(first.losses, alone.losses, first.norms, alone.norms, strict=True)):
        loss, wanted_loss, norm, wanted_norm = pairs
        measured.append((f"loss of step {step}", abs(loss - wanted_loss) / wanted_loss, bounds.loss))
        measured.append((f"norm of step {step}", abs(norm - wanted_norm) / wanted_norm, bounds.norm))
    least = 1e-3 * float(_flat(alone.gradients).norm())
    for name, wanted in alone.gradients.items():
        error = float((first.gradients[name] - wanted).norm()) / max(float(wanted.norm()), least)
        measured.append((f"gradient of {name}", error, bounds.gradient))
    moved = _flat(alone.moved)
    measured.append(("what weights moved", float((_flat(first.moved) - moved).norm() / moved.norm()), bounds.moved))
    found += [
        f"{name} is frozen and not as it was"
        for name, weight in alone.start.items()
        if name not in alone.gradients and not torch.equal(weight, first.end[name])
    ]
    off = [(what, error, bound) for what, error, bound in measured if not error <= bound]
    return found + [f"{what}: off by {error:.1e}, allowed {bound:.0e}" for what, error, bound in off]


def _flat(tensors: Tensors) -> torch.Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)]).double()
