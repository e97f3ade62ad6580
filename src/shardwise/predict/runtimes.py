"""What other programs than shardwise keep alive: FSDP1, one process or DDP. `estimate` takes its terms from here.

`terms.fsdp2` is shardwise's own; the terms here replace it by `Runtime.sharding`. How the terms were found: read from
torch 2.13 (`distributed/fsdp/_runtime_utils.py`, `_flat_param.py`, `_exec_order_utils.py`), run on small models, and
held against published measurements (`shardwise validate`).
"""

from __future__ import annotations

from shardwise.predict.quantized import quantized_facts
from shardwise.predict.terms.facts import Facts, Sums
from shardwise.predict.terms.fsdp2 import Fsdp2Terms
from shardwise.predict.terms.instants import ROOT, At, ShardingTerms
from shardwise.predict.terms.live import Live
from shardwise.predict.terms.update import OptimizerBytes
from shardwise.spec.footprint import Category
from shardwise.spec.problems import BadInput, Problem
from shardwise.spec.runtime import Runtime
from shardwise.spec.strict import DTYPE_BYTES
from shardwise.spec.workload import Workload

__all__ = ["Fsdp1Terms", "WholeTerms", "kept_cache", "quantized_facts", "sharding_terms"]

_FORWARD = ("arrival", "forward", "head", "loss")


def sharding_terms(
    runtime: Runtime, facts: Facts, optimizer: OptimizerBytes, *, hidden_bytes: int = 0, cache_bytes: int = 0
) -> ShardingTerms:
    """Return what a program's sharding keeps alive.

    Args:
        runtime: The program.
        facts: A plan and its units in bytes (`quantized_facts` of them, where the base is quantised).
        optimizer: Bytes of the plan's optimizer.
        hidden_bytes: One hidden state of a micro-batch, in the dtype of the computation.
        cache_bytes: What a cache of keys and values keeps of each block until forward is over (`kept_cache`).

    Raises:
        BadInput: a program that is not known by formula.
    """
    optimizer = _of_program(runtime, facts, optimizer)
    if runtime.sharding == "fsdp2":
        return Fsdp2Terms(facts, optimizer)
    if runtime.sharding == "fsdp1":
        return Fsdp1Terms(facts, optimizer, runtime, hidden_bytes, cache_bytes)
    if runtime.sharding == "none":
        return WholeTerms(facts, optimizer, runtime, cache_bytes)
    reason = "is not known by formula: parameters and optimizer states are split over pipelines and buckets"
    raise BadInput(Problem(field="runtime", value=runtime.sharding, reason=reason, allowed="fsdp2, fsdp1, none"))


def _of_program(runtime: Runtime, facts: Facts, optimizer: OptimizerBytes) -> OptimizerBytes:
    """Return the optimizer's bytes where a program says itself what it keeps per trained parameter."""
    if runtime.optimizer_bytes is None:
        return optimizer
    shards = facts.root.gradient_shards + sum(unit.bytes.gradient_shards for unit in facts.units)
    trained = shards // DTYPE_BYTES[facts.plan.dtypes.trained_storage]
    place: Category = "offloaded" if "offloaded" in optimizer.states else "optimizer_states"
    return OptimizerBytes(
        states={place: round(trained * runtime.optimizer_bytes)},
        temporaries=0 if runtime.step_in_backward else optimizer.temporaries,
    )


class WholeTerms:
    """One process, or DDP: weights are whole on every rank, and autograd adds whole gradients up.

    Over a shard axis optimizer states and reduced gradients are divided (DeepSpeed's ZeRO-2), weights are not.
    """

    def __init__(self, facts: Facts, optimizer: OptimizerBytes, runtime: Runtime, cache_bytes: int) -> None:
        self.facts, self.optimizer, self.runtime, self.sums = facts, optimizer, runtime, Sums(facts)
        self._cache = cache_bytes
        plan = facts.plan
        self._ranks = plan.mesh.shard
        self._replicas = plan.mesh.replicate * plan.mesh.shard > 1
        self._several = plan.accumulation_steps > 1
        self._casts = facts.root.cast > 0 or any(unit.bytes.cast > 0 for unit in facts.units)
        self._cast_before = _before([unit.bytes.cast * self._ranks for unit in facts.units])

    def at_rest(self) -> Live:
        """Return whole weights, optimizer states, and DDP's buckets, which hold every gradient once more."""
        weights = (self.facts.root.shards + self.sums.shards[-1]) * self._ranks
        buckets = self._all_gradients() * self._ranks if self._replicas and self._ranks == 1 else 0
        return {"sharded_parameters": weights, "reduce_scatter_buffers": buckets, **self.optimizer.states}

    def gathered(self, at: At) -> Live:
        """Return copies of the weights in the compute dtype (autocast): each lives from its forward to its backward."""
        if not self._casts or at.moment == "step":
            return {}
        root = self.facts.root.cast * self._ranks
        if at.unit == ROOT:
            first = at.moment in ("arrival", "forward", "reduction", "reduced")
            return {"unsharded_parameters": root + (0 if first else self._cast_before[-1])}
        return {"unsharded_parameters": root + self._cast_before[at.unit + 1]}

    def gradients(self, at: At) -> Live:
        """Return gradients in the weights' dtype: all of them once a micro-batch has been accumulated."""
        if self.runtime.step_in_backward:
            return {}
        total = self._all_gradients()
        if at.moment == "step" or (self._several and not at.evaluating):
            return {"sharded_gradients": total}
        if at.evaluating or at.moment in (*_FORWARD, "head_backward"):
            return {}
        shards, root = self.sums.gradient_shards, self.facts.root
        early = root.gradient_shards * self.facts.early_root_gradients // max(root.gradients, 1)
        if at.unit == ROOT:
            return {"sharded_gradients": shards[-1] + early}
        done = shards[-1] - shards[at.unit + 1] + early
        mine = self.facts.units[at.unit].bytes.gradient_shards if at.moment in ("reduction", "reduced") else 0
        return {"sharded_gradients": done + mine}

    def reductions(self, at: At) -> Live:
        """Return no more than the buckets at rest, and a cache that is kept in forward."""
        return {"activations": cached(self.facts, at, self._cache)}

    def update(self) -> Live:
        """Return the temporaries of the optimizer step."""
        return {"temporaries": self.optimizer.temporaries}

    def _all_gradients(self) -> int:
        return self.sums.gradient_shards[-1] + self.facts.root.gradient_shards


class Fsdp1Terms(Fsdp2Terms):
    """FSDP1: one flat parameter per unit.

    The all-gather writes the flat parameter itself, and weights are views of it: no copy-out. Gradients of the views
    are put together in one flat gradient, cast to the reduction's dtype where that is another, and reduced; all of that
    is freed, as the allocator counts, when the reduction has been issued. Backward gathers one unit ahead, but not
    under reentrant checkpointing: the unit ahead has not yet said that it will need its weights. The root stays
    gathered from the first forward to the end of backward.
    """

    def __init__(
        self, facts: Facts, optimizer: OptimizerBytes, runtime: Runtime, hidden_bytes: int, cache_bytes: int
    ) -> None:
        super().__init__(facts, optimizer)
        self.runtime, self._hidden, self._cache = runtime, hidden_bytes, cache_bytes
        checkpointed = any(unit.recomputed for unit in facts.units)
        # Rows are padded to whole shards in what is gathered, so only a large difference means frozen weights.
        frozen = any(
            unit.block_kind is not None and 2 * unit.bytes.gradients < unit.bytes.gathered for unit in facts.units
        )
        # Adapters are units of their own within a block, and one of them is what the block's backward gathers ahead.
        self._ahead = 0 if runtime.reentrant or frozen else facts.plan.prefetch.backward
        self._root_gathers = facts.plan.prefetch.backward > 0 and not runtime.reentrant
        # Blocks with frozen weights free them by a hook on the gradient of their input, which keeps that gradient, and
        # the input that a reentrant checkpoint has detached, until the end of backward.
        self._leaks = runtime.reentrant and checkpointed and frozen
        self._several = facts.plan.accumulation_steps > 1

    def gathered(self, at: At) -> Live:
        """Return flat parameters that are gathered."""
        moment, place, units = at.moment, at.unit, self.facts.units
        if moment == "step":
            return {}
        root = self.facts.root.gathered
        if place == ROOT:
            if moment in ("reduction", "reduced"):
                return {"unsharded_parameters": root if moment == "reduction" else 0}
            if moment in ("arrival", "forward"):
                return {"unsharded_parameters": root, "all_gather_buffers": self._low(self.facts.root.cast, moment)}
            last = units[-1] if moment == "head_backward" and self._root_gathers and units else None
            ahead_of_root = last.bytes.gathered - last.kept if last is not None else 0
            return {"unsharded_parameters": root + self.sums.kept[-1] + ahead_of_root}
        unit = units[place]
        weights = root + self.sums.kept[place]
        if moment != "reduced":
            weights += unit.bytes.gathered
        if moment in ("return", "backward", "reduction"):
            ahead = range(max(0, place - self._ahead), place)
            weights += sum(units[i].bytes.gathered for i in ahead if units[i].reshards is not False)
        return {"unsharded_parameters": weights, "all_gather_buffers": self._low(unit.bytes.cast, moment)}

    def gradients(self, at: At) -> Live:
        """Return gradients: whole ones of the unit at work, and sharded ones in the dtype of the weights' storage."""
        if self.runtime.step_in_backward:
            return {}
        total = self.sums.gradient_shards[-1] + self.facts.root.gradient_shards
        if at.evaluating or at.moment == "step":
            return {"sharded_gradients": total}
        done = total if self._several else self._done(at)
        return {"unsharded_gradients": self._whole(at), "sharded_gradients": done}

    def reductions(self, at: At) -> Live:
        """Return the flat gradient as it is reduced, what frozen blocks of earlier instants leak, and a kept cache."""
        leaked = self._leaked(at) + cached(self.facts, at, self._cache)
        if at.evaluating or at.moment not in ("reduction", "reduced"):
            return {"activations": leaked}
        unit = self.facts.root if at.unit == ROOT else self.facts.units[at.unit].bytes
        ranks = max(self.facts.plan.mesh.shard, 1)
        padded = unit.reduced
        buffers = unit.gradients if at.moment == "reduction" else padded + padded // ranks
        return {"reduce_scatter_buffers": buffers, "activations": leaked}

    def _low(self, cast: int, moment: str) -> int:
        """Return the shard in the compute dtype, which lives while its unit is gathered."""
        return cast if moment in ("arrival", "return") else 0

    def _done(self, at: At) -> int:
        if at.moment in (*_FORWARD, "head_backward"):
            return 0
        shards = self.sums.gradient_shards
        return shards[-1] - (0 if at.unit == ROOT else shards[at.unit + 1])

    def _whole(self, at: At) -> int:
        """Return whole gradients of units that are not reduced yet, in the dtype of the computation."""
        root = self.facts.root
        if at.moment in (*_FORWARD, "head_backward"):
            return 0
        if at.unit == ROOT:
            return root.gradients
        mine = self.facts.units[at.unit].bytes.gradients if at.moment in ("reduction", "reduced") else 0
        return self.facts.early_root_gradients + mine

    def _leaked(self, at: At) -> int:
        """Return checkpointed inputs and their gradients of blocks that backward is through with."""
        if not self._leaks or at.evaluating or at.moment in (*_FORWARD, "head_backward", "step"):
            return 0
        blocks = [place for place, unit in enumerate(self.facts.units) if unit.block_kind is not None]
        past = sum(place > at.unit for place in blocks)
        return self._hidden * max(0, 2 * past - 1)


def kept_cache(workload: Workload, runtime: Runtime, hidden_bytes: int) -> int:
    """Return what a cache of keys and values keeps of each block until forward is over: the whole output of the fused
    projection, of which they are views; behind a layer norm under autocast a quantised projection gives fp32."""
    if not runtime.keeps_cache:
        return 0
    attention, hidden = workload.model.kinds[0].attention, workload.model.hidden
    width = attention.heads * attention.head_dim + attention.kv_heads * (attention.head_dim + attention.value_dim)
    wide = 2 if runtime.autocast and runtime.base_quantization is not None else 1
    return hidden_bytes * width * wide // hidden


def cached(facts: Facts, at: At, size: int) -> int:
    """Return what a cache holds at an instant: `size` of every block that has computed, until forward is over."""
    if not size or at.evaluating or at.moment not in _FORWARD:
        return 0
    ended = at.moment in ("head", "loss")
    return size * sum(
        unit.block_kind is not None and (ended or place <= at.unit) for place, unit in enumerate(facts.units)
    )


def _before(sizes: list[int]) -> list[int]:
    total, sums = 0, [0]
    for size in sizes:
        total += size
        sums.append(total)
    return sums
