"""How long one Timeline takes: microseconds of one core per step, for several depths and micro-batches.

Brief ones have totals only; whole ones are looked at, so that their spans and waits are made.

    python bench/schedule.py

A planner plays thousands of plans; the target is well under a millisecond for 80 blocks.
"""

from __future__ import annotations

import time
from dataclasses import replace

from shardwise.predict.schedule import simulate
from shardwise.predict.schedule.costs import RootCosts, StepCosts, UnitCosts, UpdateCosts

BLOCK = UnitCosts(
    forward=0.016,
    backward=0.035,
    forward_issue=0.002,
    backward_issue=0.004,
    copy_in=0.0001,
    gather=0.0011,
    regather=0.0011,
    copy_out=0.0003,
    recopy_out=0.0003,
    reduce_copy_in=0.0005,
    reduce=0.0022,
)
"""A block of Llama-3-8B on 8 H100, roughly."""


def step_of(blocks: int, block: UnitCosts, micro_batches: int) -> StepCosts:
    """A step of FSDP2 that shards everything, one gathered ahead in backward."""
    return StepCosts(
        units=(block,) * blocks,
        names=tuple(f"model.layers.{place}" for place in range(blocks)),
        root=RootCosts(unit=UnitCosts(gather=0.003, copy_out=0.001, reduce_copy_in=0.001, reduce=0.006), head=0.01),
        update=UpdateCosts(agree=0.0001, clip=0.001, clip_exchange=0.0001, update=0.005),
        rules="nccl",
        ahead=((),) * (blocks + 1),
        behind=((), *((place,) for place in range(blocks))),
        micro_batches=micro_batches,
        slowdown=1.05,
    )


def main(repeats: int = 200) -> None:
    """Print the median and the fastest of some repeats."""
    for said, block in (("hidden", BLOCK), ("bound by reductions", replace(BLOCK, reduce=0.05))):
        for blocks, micro_batches in ((32, 1), (80, 1), (80, 16), (126, 1)):
            step = step_of(blocks, block, micro_batches)
            print(f"{said}, {blocks} blocks x {micro_batches} micro-batches, {len(simulate(step).spans)} spans:")
            for name, brief in (("whole", False), ("brief", True)):
                took = sorted(timed(step, brief) for _ in range(repeats))
                print(f"  {name}: median {took[repeats // 2] * 1e6:.0f} us, fastest {took[0] * 1e6:.0f} us")


def timed(step: StepCosts, brief: bool) -> float:
    """Return the seconds of one simulation."""
    begun = time.perf_counter()
    timeline = simulate(step, brief=brief)
    assert brief or len(timeline.spans) > len(timeline.waits)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
