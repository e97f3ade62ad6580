"""Gradients are added up in place under the tracker exactly where they are without it, with the same result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from shardwise.engine.compat import UnsupportedRelease
from shardwise.measure.allocator_events import allocator_events
from shardwise.measure.storages import StorageTracker


def fresh(h: torch.Tensor) -> torch.Tensor:
    return (h.sin() + h.cos() + h.exp()).sum()


def residual(h: torch.Tensor) -> torch.Tensor:
    r = h + h.sin()
    return (r + r.cos()).sum()


def views(h: torch.Tensor) -> torch.Tensor:
    return h.view(-1).sin().sum() + h.view(-1).cos().sum()


def transposed(h: torch.Tensor) -> torch.Tensor:
    return (h.t().sin() + h.t().cos() + h.t().exp()).sum()


def expanded(h: torch.Tensor) -> torch.Tensor:
    return h.sum() + h.sin().sum() + h.cos().sum()


def held_by_a_hook(h: torch.Tensor) -> torch.Tensor:
    kept = []
    y = h * 3
    y.register_hook(lambda gradient: kept.append(gradient))
    h.register_hook(lambda _: kept.clear())
    return (y.sin() + y + h.exp()).sum()


def indexed(h: torch.Tensor) -> torch.Tensor:
    rows = torch.tensor([0, 2, 2])
    return (h.index_select(0, rows).sin() + h[rows].cos() + h.gather(0, rows[:, None])).sum()


CASES = [fresh, residual, views, transposed, expanded, held_by_a_hook, indexed]


def _run(make: Callable[[torch.Tensor], torch.Tensor], tracked: bool) -> tuple[list[int], torch.Tensor]:
    torch.manual_seed(0)
    leaf = torch.randn(11, 7, requires_grad=True)
    loss = make(leaf * 2)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        if tracked:
            with StorageTracker():
                loss.backward()
        else:
            loss.backward()
    taken = [(event.bytes, event.operator) for event in allocator_events(profiler).events if event.bytes >= 64]
    return sorted(size for size, _ in taken), leaf.grad


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_the_same_memory_and_the_same_gradients(make):
    taken, gradient = _run(make, tracked=False)
    watched, same = _run(make, tracked=True)
    assert watched == taken
    assert torch.equal(same, gradient)


def test_a_release_that_does_not_count_holders_is_refused(monkeypatch):
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    with pytest.raises(UnsupportedRelease, match="_storage_Use_Count"):
        StorageTracker().__enter__()
    assert not _get_current_dispatch_mode_stack()
