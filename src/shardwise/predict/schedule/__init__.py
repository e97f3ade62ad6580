"""The schedule of one optimizer step: which lane does what when, as FSDP2 really orders it. No torch, no models.

    timeline = simulate(step)      # StepCosts, in seconds -> Timeline

`costs` says what goes in. On GPUs everything is issued on streams: `lanes` finds when it runs, `frame` plays a step,
`streams` has what `nccl` (FSDP2), `fsdp1` and `ddp` share. `gloo` plays FSDP2 on CPUs, where the main thread computes
and waits.
"""

from shardwise.predict.schedule.simulate import simulate

__all__ = ["simulate"]
