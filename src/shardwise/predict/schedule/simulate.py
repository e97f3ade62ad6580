"""From seconds of pieces to the schedule of a step."""

from __future__ import annotations

from shardwise.predict.schedule.costs import StepCosts
from shardwise.predict.schedule.ddp import Ddp
from shardwise.predict.schedule.fsdp1 import Fsdp1
from shardwise.predict.schedule.gloo import simulate_gloo
from shardwise.predict.schedule.nccl import Fsdp2
from shardwise.spec.timeline import Timeline


def simulate(step: StepCosts, *, brief: bool = False) -> Timeline:
    """Return what happens when in one optimizer step of rank 0, in seconds, all ranks being alike.

    Args:
        step: What it is made from.
        brief: Without spans and waits, and in a fraction of the time: for a search, which asks for totals only.
    """
    if step.rules == "gloo":
        return simulate_gloo(step, brief=brief)
    rules: dict[str, type[Fsdp2 | Fsdp1 | Ddp]] = {"nccl": Fsdp2, "fsdp1": Fsdp1, "ddp": Ddp}
    return rules[step.rules](step, brief).run()
