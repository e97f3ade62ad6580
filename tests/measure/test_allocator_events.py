"""The allocator's events by address: what lives, what was freed unseen, and which operator took it."""

from __future__ import annotations

import threading

import torch
from torch.profiler import ProfilerActivity, profile

from shardwise.measure.allocator_events import OUTSIDE, AllocatorEvent, AllocatorEvents, allocator_events


def _profiled(body) -> AllocatorEvents:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        body()
    return allocator_events(profiler)


def test_the_peak_and_who_holds_it():
    before = [torch.ones(1000)]

    def body():
        kept = torch.zeros(300)
        before.clear()  # not known to the profile, so it does not count as given back
        short = kept + 1
        del short
        kept.untyped_storage().resize_(0)
        kept.untyped_storage().resize_(800)

    events = _profiled(body)
    events = AllocatorEvents(events=tuple(event for event in events.events if abs(event.bytes) > 64))
    assert [event.bytes for event in events.events] == [1200, 1200, -1200, -1200, 800, -800]
    assert list(events.live()) == [1200, 2400, 1200, 0, 800, 0]
    assert events.peak().bytes == 2400
    assert events.peak().by_operator == {"aten::empty": 1200, "aten::add": 1200}
    assert events.events[4].operator == OUTSIDE


def test_memory_inside_a_kernel_is_seen():
    x = torch.randn(50, 100)
    peak = _profiled(lambda: torch.rms_norm(x, (100,))).peak()
    assert peak.by_operator["aten::pow"] == x.numel() * 4, "the square, which never comes out"
    assert peak.bytes > x.numel() * 4


def test_memory_given_back_in_another_thread_is_taken_as_given_back_when_its_address_returns():
    def body():
        held = [torch.zeros(2500)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        again = torch.zeros(2500)
        assert again.numel()

    events = _profiled(body)
    if len({event.address for event in events.events}) == 1:
        assert [event.bytes for event in events.events] == [10000, -10000, 10000, -10000]


def test_nothing_taken():
    peak = AllocatorEvents(events=()).peak()
    assert (peak.bytes, peak.by_operator) == (0, {})
    one = AllocatorEvent(nanoseconds=0, address=1, bytes=5, operator="x")
    assert AllocatorEvents(events=(one,)).peak().by_operator == {"x": 5}
