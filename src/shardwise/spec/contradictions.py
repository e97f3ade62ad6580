"""Settings that are each fine and cannot hold together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwise.spec.chosen import Chosen
from shardwise.spec.contradictions_layout import of_layout, of_optimizer
from shardwise.spec.keys import Given
from shardwise.spec.problems import Problem


def contradictions(chosen: Mapping[str, Chosen], dropped: Mapping[str, Given]) -> Iterator[Problem]:
    """Yield every contradiction; `dropped` holds, by name, the settings given as false."""
    given = {key: choice for key, choice in chosen.items() if choice.value is not None}
    yield from _length(given)
    yield from _lora(given)
    yield from _batches(given)
    yield from _held_out(given)
    yield from _flags(given, dropped)
    yield from of_layout(given)
    yield from of_optimizer(given)


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
            "has no effect without use_lora: true: all weights are trained",
            fix="set use_lora: true, or mixed_precision.storage_dtype in its place",
        )
    for key, choice in given.items():
        if key.startswith("lora_"):
            yield choice.given.problem("has no effect without use_lora: true", fix="set use_lora: true, or remove it")


def _batches(given: Mapping[str, Chosen]) -> Iterator[Problem]:
    whole, micro = given.get("global_batch"), given.get("micro_batch")
    sizes = [choice.value for choice in (whole, micro) if choice and isinstance(choice.value, int) and choice.value > 0]
    if whole and micro and len(sizes) == 2 and sizes[0] % sizes[1]:
        yield whole.given.problem(f"contradicts {micro}", fix="global_batch must be a multiple of micro_batch x ranks")


def _held_out(given: Mapping[str, Chosen]) -> Iterator[Problem]:
    path, held_out = given.get("data.path"), given.get("data.held_out")
    if path and held_out and path.value == held_out.value:
        yield held_out.given.problem(
            "is the file that is trained on", fix="give another file, or a fraction such as 0.05"
        )


def _flags(given: Mapping[str, Chosen], dropped: Mapping[str, Given]) -> Iterator[Problem]:
    """Compare flags of Trainer's that were given as false with what was chosen in their place."""
    param, head = given.get("mixed_precision.param_dtype"), given.get("loss_head")
    flag = dropped.get(str(param.value)) if param else None
    if param and flag:
        yield flag.problem(f"contradicts {param}", fix="keep one of the two")
    liger = dropped.get("use_liger_kernel")
    if head and head.value == "fused" and liger:
        yield liger.problem(f"contradicts {head}", fix="keep one of the two")
