"""The first step of a run is watched: its collectives and dtypes are compared with the plan. Later steps are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.engine.ledger import computing_dtypes, dtype_ledger
from shardwise.engine.readback import PlanNotHonoured
from shardwise.measure.collectives import CollectiveCounter
from shardwise.predict.collectives import collectives_of_step
from shardwise.spec.collectives import Collectives
from shardwise.spec.ledger import DtypeLedger
from shardwise.spec.plan import Plan
from shardwise.spec.units import UnitTable

T = TypeVar("T")


@contextmanager
def _paused_in_step(counter: CollectiveCounter, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Leave the counter while the optimizer steps."""
    leave: Any = counter.__exit__
    enter: Any = counter.__enter__

    def pause(*_: object) -> None:
        leave(None, None, None)

    def resume(*_: object) -> None:
        enter()

    hooks = (optimizer.register_step_pre_hook(pause), optimizer.register_step_post_hook(resume))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What the first step did on this rank."""

    collectives: Collectives
    """Counted."""
    planned: Collectives
    """By the plan's closed formula; equal to the counted ones."""
    dtypes: DtypeLedger
    """Read back."""


def watch(
    step: Callable[[], T | None],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    units: UnitTable,
    mesh: DeviceMesh,
) -> tuple[T | None, Watched | None]:
    """Run one training step under observation; returns its result and, when it was not given up, what was seen.

    Every hook is gone afterwards. The optimizer's own step is left unwatched: it issues no collective, and torchao's
    compiles, which cannot be done under a counter.

    Raises:
        PlanNotHonoured: naming every collective and dtype that is not as planned.
    """
    counter = CollectiveCounter(mesh)
    with computing_dtypes(model) as seen, counter, _paused_in_step(counter, optimizer):
        result = step()
    if result is None:
        return None, None
    planned = collectives_of_step(plan, units, device_type=mesh.device_type)
    dtypes = dtype_ledger(model, optimizer, plan, seen)
    differences = [str(found) for found in counter.collectives.differences(planned)]
    if differences or dtypes.differences():
        raise PlanNotHonoured([*differences, *dtypes.differences()])
    return result, Watched(collectives=counter.collectives, planned=planned, dtypes=dtypes)
