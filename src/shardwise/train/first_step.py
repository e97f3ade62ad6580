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
from shardwise.predict.tensor_axis import TensorWork
from shardwise.spec.collectives import Collectives
from shardwise.spec.ledger import DtypeLedger
from shardwise.spec.plan import Plan
from shardwise.spec.units import UnitTable
from shardwise.train.tensor_work import without_tensor_axis

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
    compared: bool
    """All of them equal the plan's closed formula; else all but those of the tensor axis, for which there is none."""
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
    tensor: TensorWork | None,
) -> tuple[T | None, Watched | None]:
    """Run one training step under observation; returns its result and, when it was not given up, what was seen.

    Every hook is gone afterwards. The optimizer's own step is left unwatched: it issues no collective, and torchao's
    compiles, which cannot be done under a counter.

    Args:
        step: The step; no stop is looked for within it.
        model: Sharded.
        optimizer: Its optimizer.
        plan: What is decided.
        units: The model's units.
        mesh: All ranks.
        tensor: What the tensor axis works on, where a formula says what it exchanges for that.

    Raises:
        PlanNotHonoured: naming every collective and dtype that is not as planned.
    """
    counter = CollectiveCounter(mesh)
    with computing_dtypes(model) as seen, counter, _paused_in_step(counter, optimizer):
        result = step()
    if result is None:
        return None, None
    compared = plan.mesh.tensor == 1 or tensor is not None
    counted = counter.collectives
    if compared:
        planned = collectives_of_step(plan, units, device_type=mesh.device_type, tensor=tensor)
        differences = counted.differences(planned)
    else:
        planned = collectives_of_step(plan, units, device_type=mesh.device_type, leave_tensor_out=True)
        differences = without_tensor_axis(counted).differences(without_tensor_axis(planned))
    dtypes = dtype_ledger(model, optimizer, plan, seen)
    if differences or dtypes.differences():
        raise PlanNotHonoured([*map(str, differences), *dtypes.differences()])
    return result, Watched(collectives=counted, compared=compared, dtypes=dtypes)
