"""The schedule of one optimizer step: which lane does what when, as FSDP2 really orders it. No torch, no models.

    timeline = simulate(step)      # StepCosts, in seconds -> Timeline

`costs` says what goes in; `nccl` plays FSDP2 on GPUs, with streams; `gloo` plays it on CPUs, where the main thread computes
and waits.
"""
