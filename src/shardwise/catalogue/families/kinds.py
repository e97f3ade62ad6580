"""Names of the kinds of blocks in a model: what sets each apart from the others."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.spec.model_spec import Attention, Mlp


def kind_names(kinds: Sequence[tuple[Attention, Mlp]]) -> list[str]:
    """Return a name per kind; a model with one kind has a `block`."""
    windows = {attention.window for attention, _ in kinds}
    mixtures = {bool(mlp.experts) for _, mlp in kinds}
    names: list[str] = []
    for attention, mlp in kinds:
        parts = []
        if len(windows) > 1:
            parts.append("full attention" if attention.window is None else "sliding window")
        if len(mixtures) > 1:
            parts.append("mixture of experts" if mlp.experts else "dense")
        name = ", ".join(parts) or "block"
        alike = sum(other == name or other.startswith(name + " ") for other in names)
        names.append(f"{name} {alike + 1}" if alike else name)
    return names
