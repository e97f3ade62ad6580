"""The optimizer: its states at rest, and what an update needs for a moment.

Read from torch 2.13 (`optim/adam.py`, `optim/sgd.py`), torchao 0.18 (`optim/adam.py`, `optim/subclass_8bit.py`) and
`engine.resting_state`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardwise.predict.terms.live import Live
from shardwise.predict.unit_rows import UnitTensor
from shardwise.spec.plan import Plan
from shardwise.spec.strict import DTYPE_BYTES

STATES = {"adamw": 2, "adamw_8bit": 2, "sgd": 1}
"""States per trained element; that of sgd is its momentum."""

BUCKET_ELEMENTS = 8 * 2**20
"""Elements whose states are brought to work at once (`engine.resting_state.BUCKET_ELEMENTS`)."""

EIGHT_BIT_BLOCK = 256
EIGHT_BIT_SMALLEST = 4096
"""Elements that share a scale, and elements of a shard from which on it is kept in 8 bits (`engine.eight_bit`)."""

EIGHT_BIT_WORK = 2
"""fp32 copies of one shard that torchao's compiled update holds: both states. Seen on a CPU with torchao 0.18 and torch
2.13: 32.1 MiB for a shard of 16 MiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerBytes:
    """An optimizer over this rank's shards."""

    states: Live
    """Its states at rest: `optimizer_states`, or `offloaded`."""
    temporaries: int
    """The most that an update holds beside them."""


def optimizer_bytes(tensors: Iterable[tuple[UnitTensor, int]], plan: Plan, device_type: str) -> OptimizerBytes:
    """Return the bytes of the plan's optimizer.

    Args:
        tensors: Parameters of the model, each with how often it occurs; each once, in the order of the model, where the
            update goes `by_buckets`.
        plan: What is decided.
        device_type: On `cpu` what is offloaded stays in the same memory.
    """
    trained = [(tensor.rank_elements, count, _decays(tensor)) for tensor, count in tensors if tensor.trained]
    if plan.optimizer == "adamw_8bit":
        states = sum(count * 2 * _eight_bit_state(elements) for elements, count, _ in trained)
        work = EIGHT_BIT_WORK * 4 * max((elements for elements, _, _ in trained), default=0)
        return OptimizerBytes(states={"optimizer_states": states}, temporaries=work)
    elements = sum(elements * count for elements, count, _ in trained)
    states = STATES[plan.optimizer] * elements * DTYPE_BYTES[plan.dtypes.optimizer_state]
    away = _on_host(plan) and device_type == "cuda"
    groups = [[(elements, count) for elements, count, decays in trained if decays is side] for side in (True, False)]
    if by_buckets(plan):
        work = max(_resting_work(group, plan, away) for group in groups)
    else:
        work = max(_work(group, plan, decays=bool(place == 0)) for place, group in enumerate(groups))
        work *= DTYPE_BYTES[plan.dtypes.trained_storage]
    return OptimizerBytes(states={"offloaded" if away else "optimizer_states": states}, temporaries=work)


def by_buckets(plan: Plan) -> bool:
    """Whether states rest elsewhere, or otherwise, than where they are updated (`engine.optimizer.build_optimizer`)."""
    fused_sgd = plan.optimizer == "sgd" and plan.optimizer_implementation == "fused"
    return _on_host(plan) or fused_sgd or plan.dtypes.optimizer_state != plan.dtypes.trained_storage


def _on_host(plan: Plan) -> bool:
    return plan.offload.optimizer and not plan.offload.parameters


def _decays(tensor: UnitTensor) -> bool:
    """Whether weight decay is for it (`engine.optimizer.decays`): one group of the optimizer, the others another."""
    return len(tensor.shape) > 1 and "bias" not in tensor.name


def _work(group: Sequence[tuple[int, int]], plan: Plan, *, decays: bool) -> int:
    """Return the elements of temporaries that an update of one group needs; (elements, count) per shard.

    AdamW takes the root of the second state, of all parameters at once (foreach), or of one after the other (for_loop):
    root and quotient, while the quotient of the one before is still there. SGD adds the decay to a copy of the
    gradients. Fused kernels need nothing.
    """
    if plan.optimizer_implementation == "fused" or (plan.optimizer == "sgd" and not decays):
        return 0
    if plan.optimizer_implementation == "foreach":
        return sum(elements * count for elements, count in group)
    if plan.optimizer == "sgd":
        return max((elements for elements, _ in group), default=0)
    most = before = 0
    for elements, _ in group:
        most = max(most, before + 2 * elements)
        before = elements
    return most


def _resting_work(group: Sequence[tuple[int, int]], plan: Plan, away: bool) -> int:
    """Return the bytes that an update needs bucket by bucket, on states that rest in another dtype or on the host."""
    dtypes = plan.dtypes
    work = "fp32" if "fp32" in (dtypes.optimizer_state, dtypes.trained_storage) else "bf16"
    copies = STATES[plan.optimizer] * (away or dtypes.optimizer_state != work) + 2 * (dtypes.trained_storage != work)
    most = max(
        (
            copies * sum(bucket) + _work([(elements, 1) for elements in bucket], plan, decays=True)
            for bucket in _buckets(group)
        ),
        default=0,
    )
    return most * DTYPE_BYTES[work]


def _buckets(group: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
    """Yield the shards that are updated together (`engine.resting_state`)."""
    bucket: list[int] = []
    held = 0
    for elements in (elements for elements, count in group for _ in range(count)):
        if bucket and held + elements > BUCKET_ELEMENTS:
            yield bucket
            bucket, held = [], 0
        bucket.append(elements)
        held += elements
    if bucket:
        yield bucket


def _eight_bit_state(elements: int) -> int:
    """Return the bytes of one 8-bit state: codes, a scale per block, the table of values; small ones stay fp32."""
    if elements < EIGHT_BIT_SMALLEST or elements % EIGHT_BIT_BLOCK:
        return 4 * elements
    return elements + elements // EIGHT_BIT_BLOCK * 4 + 256 * 4
