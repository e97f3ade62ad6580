"""How many plans a second the estimate looks at: every combination of a search over one model, on one core.

    python bench/plans_per_second.py [model] [cluster]

Prints plans per second of the first pass, which works everything out, and of a second one over the same plans in
another order; the target is 10,000. Then, for some of the plans, each of them new, milliseconds of whole Reports
(Footprint and Timeline) and of Timelines without spans, by micro-batches; the target is 1 for a Report of 80 blocks:

    python bench/plans_per_second.py llama-2-70b
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from shardwise.catalogue.clusters import find_cluster
from shardwise.catalogue.models import find_model
from shardwise.predict.estimate import estimate, estimate_peak
from shardwise.predict.step_time import timeline_of
from shardwise.spec.layout import Mesh, Offload, Prefetch, ReduceScatter, Units
from shardwise.spec.plan import Dtypes, Plan
from shardwise.spec.workload import Workload

DTYPES = Dtypes(
    frozen_storage=None,
    trained_storage="fp32",
    param="bf16",
    reduce="fp32",
    output="fp32",
    buffer=None,
    loss_scaling=False,
)


SOME = 600
"""Plans whose Reports are timed."""


def plans(world: int) -> Iterator[Plan]:
    """Yield the plans of a search on `world` ranks."""
    layouts: list[dict[str, Any]] = [
        {"strategy": "FULL_SHARD", "mesh": Mesh(shard=world), "reshard_after_forward": True},
        {"strategy": "SHARD_GRAD_OP", "mesh": Mesh(shard=world), "reshard_after_forward": False},
        {"strategy": "FULL_SHARD", "mesh": Mesh(shard=world), "reshard_after_forward": 8},
        {"strategy": "HYBRID_SHARD", "mesh": Mesh(replicate=world // 8, shard=8), "reshard_after_forward": True},
        {"strategy": "FULL_SHARD", "mesh": Mesh(shard=world // 2, tensor=2), "reshard_after_forward": True},
    ]
    for layout, checkpointing, rows, loss_head, ahead, buffers, ends, mode, offload, reduce in product(
        layouts,
        ("none", "selective", "every_2", "full"),
        (1, 2, 4, 8, 16),
        ("eager", "chunked"),
        ((0, 1), (1, 1), (2, 2)),
        (1, 2),
        ("root", "own"),
        ("reduce_each", "defer_all"),
        (False, True),
        ("fp32", "bf16"),
    ):
        yield Plan(
            prefetch=Prefetch(forward=ahead[0], backward=ahead[1], async_all_gather=True),
            reduce_scatter=ReduceScatter(buffers=buffers, separate_group=False, asynchronous=True),
            dtypes=DTYPES.model_copy(update={"reduce": reduce}),
            activation_checkpointing=checkpointing,
            attention="sdpa",
            micro_batch=rows,
            accumulation_steps=4,
            accumulation_mode=mode,
            optimizer_implementation="fused",
            loss_head=loss_head,
            units=Units(embedding=ends, head=ends),
            offload=Offload(optimizer=offload),
            **layout,
        )


def main(model: str = "llama-3.1-8b", cluster: str = "8x8xH100-SXM-80GB") -> None:
    """Print plans per second."""
    workload, machines = Workload(model=find_model(model), seq_len=4096), find_cluster(cluster)
    searched = list(plans(machines.world))
    for pass_ in ("first pass", "second pass, shuffled"):
        begun = time.process_time()
        for plan in searched:
            estimate_peak(workload, plan, machines)
        seconds = time.process_time() - begun
        print(f"{pass_}: {len(searched)} plans in {seconds:.2f} s of one core: {len(searched) / seconds:,.0f} a second")
        random.Random(0).shuffle(searched)
    for steps in (1, 4):
        some = [plan.model_copy(update={"accumulation_steps": steps}) for plan in searched[:SOME]]
        times(f"Reports of {steps} micro-batches", some, lambda plan: estimate(workload, plan, machines))
        times(f"brief Timelines of {steps}", some, lambda plan: timeline_of(workload, plan, machines, brief=True))


def times(what: str, some: list[Plan], make: Callable[[Plan], object]) -> None:
    """Print the middle and the slowest tenth, when what plans have in common is known."""
    for plan in some:
        make(plan)
    taken = []
    for plan in some:
        begun = time.process_time()
        make(plan)
        taken.append(time.process_time() - begun)
    taken.sort()
    print(f"{what}: {taken[len(taken) // 2] * 1e3:.2f} ms, a tenth above {taken[len(taken) * 9 // 10] * 1e3:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
