"""What a step copies and updates beside its computation: bytes read and written on the device, and operations.

No torch. Counted is one rank. Read from torch 2.13 (`distributed/fsdp/_fully_shard/_fsdp_collectives.py`,
`optim/adam.py`, `optim/sgd.py`, `nn/utils/clip_grad.py`), torchao 0.18 (`optim/adam.py`) and `engine.resting_state`.
Gradients are set to None behind a step, which moves nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from shardwise.predict.terms.unit_bytes import UnitBytes
from shardwise.predict.terms.update import BUCKET_ELEMENTS, EIGHT_BIT_BLOCK, STATES, by_buckets
from shardwise.spec.plan import Plan
from shardwise.spec.strict import DTYPE_BYTES

_TENSORS, _ELEMENTS = 36, 320 * 65536
"""Tensors, and elements, that one launch of a kernel over lists takes (`ATen/native/cuda/MultiTensorApply.cuh`: 320
blocks of 65536 elements; 36 tensors of four lists)."""

_SINGLY = {"adamw": (4, 2, 8, 6), "sgd": (3, 1, 5, 2)}
"""How often an update that is one operation after the other reads or writes weights, gradients, states and temporaries.

AdamW: decay (weights 2), first state (2, gradients 1), second state twice (2; 2, gradients 1), its root (states 1,
temporaries 1), that divided (2) and shifted (2), the step (weights 2, states 1, temporaries 1). sgd with momentum:
decay (weights 1, gradients 1, temporaries 1), momentum twice (2; 2, temporaries 1), the step (weights 2, states 1)."""
_OPERATIONS = {"adamw": 8, "sgd": 4}
"""Operations of such an update."""

_EIGHT_BIT_OPERATIONS = 3
"""Kernels per shard that torchao's compiled update becomes: the update, and for each state its codes."""


class Moves(NamedTuple):
    """Pointwise operations and copies."""

    moved: int
    """Bytes read and written."""
    operations: int
    """Operations that are launched."""


def copy_in(size: UnitBytes, plan: Plan) -> Moves:
    """Return what putting a unit's shards into a gather's buffer moves: the cast of those stored in another dtype, then
    the copy of all. Over one rank nothing is gathered, and they are cast alone."""
    mine = size.gathered // plan.mesh.shard
    cast = size.shards - mine + 2 * size.cast if size.cast else 0
    if plan.mesh.shard == 1:
        return Moves(cast, int(size.cast > 0))
    return Moves(cast + 2 * mine, 1 + int(size.cast > 0))


def keep(size: UnitBytes, ranks: int) -> Moves:
    """Return what keeping this rank's part of a unit's weights moves, where they are resharded over `ranks`."""
    return Moves(2 * (size.gathered // ranks), 1)


def recopy_in(size: UnitBytes, plan: Plan, ranks: int) -> Moves:
    """Return what putting that part into the buffer of a gather over `ranks` moves. It is in the compute dtype, but
    where weights are stored in another it goes through the copy that casts shards all the same."""
    copies = 1 + int(size.cast > 0 and not plan.offload.parameters)
    return Moves(copies * 2 * (size.gathered // ranks), copies)


def copy_out(size: UnitBytes, plan: Plan) -> Moves:
    """Return what taking a unit's weights out of a gather's buffer moves; over one rank, copying them."""
    return Moves(2 * size.gathered, 1)


def reduce_copy_in(size: UnitBytes, plan: Plan) -> Moves:
    """Return what putting a unit's whole gradients into a reduction's buffer, cast and padded, moves.

    Gradients that have waited for the last micro-batch are in the dtype of the reduction already. fp16 is divided
    before it is summed, lest it overflows.
    """
    if not size.reduced:
        return Moves(0, 0)
    waited = plan.accumulation_mode == "defer_all" and plan.accumulation_steps > 1
    moved = size.reduced + (size.kept_gradients if waited else size.gradients)
    if plan.dtypes.reduce == "fp16":
        return Moves(moved + 2 * size.reduced, 2)
    return Moves(moved, 1)


def reduce_copy_out(size: UnitBytes, plan: Plan) -> Moves:
    """Return what the cast of a unit's reduced gradients to the dtype of its shards moves, behind the reduction."""
    if not size.reduced or plan.dtypes.reduce == plan.dtypes.trained_storage:
        return Moves(0, 0)
    return Moves(size.reduced // plan.mesh.shard + size.gradient_shards, 1)


def clip(elements: int, tensors: int, plan: Plan) -> Moves:
    """Return what the norm of gradients (each tensor's own) and their scaling move.

    Args:
        elements: Trained elements of this rank.
        tensors: Tensors that hold them.
        plan: What is decided.
    """
    return Moves(3 * elements * DTYPE_BYTES[plan.dtypes.trained_storage], tensors + _launches(elements, tensors))


def update(elements: int, tensors: int, plan: Plan) -> Moves:
    """Return what the optimizer moves; AdamW, all in fp32: 28 bytes per element fused, 80 otherwise.

    Args:
        elements: Trained elements of this rank.
        tensors: Tensors that hold them.
        plan: What is decided.
    """
    if plan.optimizer == "adamw_8bit":
        return _eight_bit(elements, tensors, plan)
    if not by_buckets(plan):
        stored, state = DTYPE_BYTES[plan.dtypes.trained_storage], DTYPE_BYTES[plan.dtypes.optimizer_state]
        return _worked(elements, tensors, plan, stored, state)
    return _by_buckets(elements, tensors, plan)


def state_bytes(elements: int, plan: Plan) -> int:
    """Return the bytes of the states of so many trained elements at rest; of 8-bit ones, codes and scales."""
    if plan.optimizer == "adamw_8bit":
        return 2 * (elements + 4 * elements // EIGHT_BIT_BLOCK)
    return STATES[plan.optimizer] * elements * DTYPE_BYTES[plan.dtypes.optimizer_state]


def _worked(elements: int, tensors: int, plan: Plan, stored: int, state: int) -> Moves:
    """One update of weights of `stored` bytes on states of `state` bytes; sgd has momentum."""
    kind = plan.optimizer_implementation
    launches = tensors if kind == "for_loop" else _launches(elements, tensors)
    states = STATES[plan.optimizer]
    if kind == "fused":
        return Moves(elements * (3 * stored + 2 * states * state), launches)
    weights, gradients, read_states, temporaries = _SINGLY[plan.optimizer]
    passes = (weights + gradients) * stored + read_states * state + temporaries * max(stored, state)
    return Moves(elements * passes, _OPERATIONS[plan.optimizer] * launches)


def _by_buckets(elements: int, tensors: int, plan: Plan) -> Moves:
    """An update on states that rest in another dtype or on the host, and are brought to work and back."""
    dtypes = plan.dtypes
    work = 4 if "fp32" in (dtypes.optimizer_state, dtypes.trained_storage) else 2
    stored, state = DTYPE_BYTES[dtypes.trained_storage], DTYPE_BYTES[dtypes.optimizer_state]
    away = plan.offload.optimizer and not plan.offload.parameters
    states = STATES[plan.optimizer] if away or state != work else 0
    buckets = max(1, -(-elements // BUCKET_ELEMENTS))
    one = _worked(-(-elements // buckets), -(-tensors // buckets), plan, work, work)
    worked = _worked(elements, tensors, plan, work, work)
    moved = 2 * states * (state + work) + (3 * (stored + work) if stored != work else 0)
    copies = 2 * states + (3 if stored != work else 0)
    return Moves(worked.moved + elements * moved, one.operations * buckets + copies * tensors)


def _eight_bit(elements: int, tensors: int, plan: Plan) -> Moves:
    """torchao's update: codes become fp32 states, which are written, and read again to become codes."""
    codes = state_bytes(elements, plan)
    moved = elements * (3 * DTYPE_BYTES[plan.dtypes.trained_storage] + 2 * 2 * 4) + 2 * codes
    return Moves(moved, _EIGHT_BIT_OPERATIONS * tensors)


def _launches(elements: int, tensors: int) -> int:
    """Launches of one kernel over lists of so many tensors."""
    return max(-(-tensors // _TENSORS), -(-elements // _ELEMENTS))
