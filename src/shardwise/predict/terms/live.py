"""Live bytes by category, and adding them up."""

from __future__ import annotations

from shardwise.spec.footprint import Category

Live = dict[Category, int]
"""Bytes by category; what is not named is 0. `offloaded` lies on the host and is in no total."""


def together(*parts: Live) -> Live:
    """Return the sum of some live bytes, category by category, without zeros."""
    total: Live = {}
    for part in parts:
        for category, size in part.items():
            if size:
                total[category] = total.get(category, 0) + size
    return total


def on_device(live: Live) -> int:
    """Return the bytes that lie on the device."""
    return sum(live.values()) - live.get("offloaded", 0)
