"""Settings that are each fine and cannot hold together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardwise.spec.keys import Given
from shardwise.spec.problems import Problem
from shardwise.spec.yaml_text import shown

_LONGEST = 60


@dataclass(frozen=True)
class Chosen:
    """The value of one dotted key of the Job, and the setting that gave it."""

    value: object
    """Value in the Job's own form."""
    given: Given
    """Where it comes from."""

    def __str__(self) -> str:
        value = self.given.value
        words = shown(value) if isinstance(value, str) else repr(value)
        return f"{shown(self.given.written)}: {words.lower() if isinstance(value, bool) else words[:_LONGEST]}"


def contradictions(chosen: Mapping[str, Chosen], dropped: Mapping[str, Given]) -> Iterator[Problem]:
    """Yield every contradiction; `dropped` holds, by name, the settings given as false."""
    given = {key: choice for key, choice in chosen.items() if choice.value is not None}
    yield from _length(given)
    yield from _lora(given)
    yield from _batches(given)
    yield from _resharding(given)
    yield from _held_out(given)
    yield from _precision(given, dropped)


def _length(given: Mapping[str, Chosen]) -> Iterator[Problem]:
    steps, epochs, warmup = (given.get(key) for key in ("steps", "epochs", "warmup_steps"))
    if steps and epochs:
        yield epochs.given.problem(f"contradicts {steps}", fix="keep one of the two")
    if steps and warmup and _above(warmup, steps):
        yield warmup.given.problem(f"contradicts {steps}", fix=f"warm up for at most {steps.value} steps")


def _above(one: Chosen, other: Chosen) -> bool:
    return isinstance(one.value, int) and isinstance(other.value, int) and one.value > other.value


def _lora(given: Mapping[str, Chosen]) -> Iterator[Problem]:
    use = given.get("use_lora")
    if use is not None and use.value is not False:
        return
    if "model.dtype" in given:
        yield given["model.dtype"].given.problem(
            "has no effect without use_lora: true: what trains is stored in fp32",
            fix="set use_lora: true, or remove it",
        )
    for key, choice in given.items():
        if key.startswith("lora_"):
            yield choice.given.problem("has no effect without use_lora: true", fix="set use_lora: true, or remove it")


def _batches(given: Mapping[str, Chosen]) -> Iterator[Problem]:
    whole, micro = given.get("global_batch"), given.get("micro_batch")
    sizes = [choice.value for choice in (whole, micro) if choice and isinstance(choice.value, int) and choice.value > 0]
    if whole and micro and len(sizes) == 2 and sizes[0] % sizes[1]:
        yield whole.given.problem(f"contradicts {micro}", fix="global_batch must be a multiple of micro_batch x ranks")


def _resharding(given: Mapping[str, Chosen]) -> Iterator[Problem]:
    reshard, strategy = given.get("fsdp.reshard_after_forward"), given.get("fsdp.strategy")
    if not reshard or not strategy or not isinstance(reshard.value, bool):
        return
    if strategy.value == "NO_SHARD":
        yield reshard.given.problem(f"contradicts {strategy}", fix="remove it: NO_SHARD gathers nothing")
    elif strategy.value in ("FULL_SHARD", "SHARD_GRAD_OP") and reshard.value is not (strategy.value == "FULL_SHARD"):
        other = "FULL_SHARD" if reshard.value else "SHARD_GRAD_OP"
        yield reshard.given.problem(f"contradicts {strategy}", fix=f"remove it, or set the strategy to {other}")


def _held_out(given: Mapping[str, Chosen]) -> Iterator[Problem]:
    path, held_out = given.get("data.path"), given.get("data.held_out")
    if path and held_out and path.value == held_out.value:
        yield held_out.given.problem(
            "is the file that is trained on", fix="give another file, or a fraction such as 0.05"
        )


def _precision(given: Mapping[str, Chosen], dropped: Mapping[str, Given]) -> Iterator[Problem]:
    param = given.get("mixed_precision.param_dtype")
    flag = dropped.get(str(param.value)) if param else None
    if param and flag:
        yield flag.problem(f"contradicts {param}", fix="keep one of the two")
