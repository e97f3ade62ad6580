"""The terms of a plan put together: one step, the bytes at any of its instants, and the highest of each phase."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from math import ceil

from shardwise.predict.blocks import Computation, PartMemory, modes_of
from shardwise.predict.blocks.memory import adds_gradients
from shardwise.predict.remembered import remember
from shardwise.predict.runtimes import kept_cache, quantized_facts, sharding_terms
from shardwise.predict.terms.candidates import Candidate, candidates
from shardwise.predict.terms.facts import Facts, PlacedUnit
from shardwise.predict.terms.instants import ROOT, At
from shardwise.predict.terms.layout import facts_of
from shardwise.predict.terms.live import Live, together
from shardwise.predict.terms.step import Parts, Sharding, Step
from shardwise.predict.terms.unit_bytes import own_vocab
from shardwise.predict.terms.update import OptimizerBytes, by_buckets, optimizer_bytes
from shardwise.predict.unit_rows import UnitKind, UnitTensor, unit_kinds
from shardwise.predict.workspace import HANDLES, workspace_bytes
from shardwise.spec.cluster import Gpu
from shardwise.spec.footprint import Phase
from shardwise.spec.layout import is_checkpointed
from shardwise.spec.model_spec import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.strict import DTYPE_BYTES
from shardwise.spec.workload import HELD_OUT_PER_TRAINED

_REMEMBERED = 4096
"""Layouts, and computations, that are remembered of one workload; the oldest goes first."""


class Assembly:
    """Steps of one workload on one kind of device; what several plans have in common is worked out once."""

    def __init__(self, computed: Computation, gpu: Gpu | None) -> None:
        self.computed, self.gpu = computed, gpu
        self._workspace = 0 if gpu is None else HANDLES * workspace_bytes(gpu)
        self._shardings: dict[tuple[object, ...], Sharding] = {}
        self._parts: dict[tuple[object, ...], Parts] = {}
        self._known_facts: dict[tuple[object, ...], tuple[Facts, tuple[UnitKind, ...]]] = {}
        self._optimizers: dict[tuple[object, ...], tuple[OptimizerBytes, tuple[UnitKind, ...]]] = {}

    def step(self, plan: Plan) -> Step:
        """Return one step of a plan.

        Raises:
            BadInput: a layout that no formula describes.
        """
        parts = self._remembered_parts(plan)
        return Step(
            plan=plan,
            sharding=self._remembered_sharding(plan, parts),
            parts=parts,
            workspace=self._workspace,
            # A GPU gets each micro-batch when it runs; on CPUs all batches of a step lie in the same memory.
            inputs=parts.ends.inputs * (plan.accumulation_steps if self.gpu is None else 1),
            block_list=self.computed.workload.model.block_list,
            held_out=self.computed.workload.held_out,
        )

    def _remembered_parts(self, plan: Plan) -> Parts:
        mesh = plan.mesh
        key = (
            plan.micro_batch,
            plan.activation_checkpointing,
            plan.loss_head,
            plan.loss_chunk,
            plan.dtypes.param,
            plan.dtypes.output,
            plan.attention,
            plan.compile,
            plan.offload.activations,
            mesh.tensor,
            mesh.sequence_parallel,
            adds_gradients(plan),
        )
        return self._parts.get(key) or remember(self._parts, key, self._make_parts(plan), most=_REMEMBERED)

    def _remembered_sharding(self, plan: Plan, parts: Parts) -> Sharding:
        mesh, dtypes, offload, units = plan.mesh, plan.dtypes, plan.offload, plan.units
        prefetch, reductions = plan.prefetch, plan.reduce_scatter
        hidden = 0 if self.computed.runtime.sharding == "fsdp2" else parts.ends.embedding.output
        key = (
            (mesh.replicate, mesh.shard, mesh.tensor, plan.reshard_after_forward, plan.activation_checkpointing),
            (units.wrap, units.embedding, units.head, prefetch.forward, prefetch.backward, prefetch.async_all_gather),
            (dtypes.frozen_storage, dtypes.trained_storage, dtypes.optimizer_state, dtypes.param, dtypes.reduce),
            (reductions.buffers, reductions.asynchronous, plan.accumulation_mode, plan.accumulation_steps > 1),
            (plan.optimizer, plan.optimizer_implementation, offload.optimizer, offload.parameters, hidden),
        )
        return self._shardings.get(key) or remember(
            self._shardings, key, self._make_sharding(plan, hidden), most=_REMEMBERED
        )

    def _make_parts(self, plan: Plan) -> Parts:
        evaluated = plan.model_copy(update={"micro_batch": HELD_OUT_PER_TRAINED * plan.micro_batch})
        ends, blocks = self.computed.ends(plan), self._blocks(plan)
        workload = self.computed.workload
        dtypes = plan.dtypes
        item = DTYPE_BYTES[dtypes.param] + (DTYPE_BYTES[dtypes.output] if dtypes.output != dtypes.param else 0)
        vocab = own_vocab(workload.model, plan, self.computed.runtime)
        logits = plan.micro_batch * workload.seq_len * vocab
        # A tensor group gathers its parts of the logits, and puts them together in a copy.
        split = plan.mesh.tensor > 1 and vocab == workload.model.vocab
        own = (logits + logits // plan.mesh.tensor) * DTYPE_BYTES[dtypes.param] if split else 0
        trained = plan.micro_batch * max(1, workload.seq_len - 1)
        pieces = ceil(trained / plan.loss_chunk) if plan.loss_head == "chunked" else 1
        return Parts(
            ends=ends,
            blocks=blocks,
            evaluated_ends=self.computed.ends(evaluated),
            evaluated=self._blocks(evaluated),
            kept=tuple(accumulate((part.kept for part in blocks), initial=ends.embedding.kept)),
            pieces=pieces,
            logits=logits * item,
            logits_gradient=logits * DTYPE_BYTES[dtypes.param] + own,
            evaluated_logits=HELD_OUT_PER_TRAINED * (logits * item + own),
        )

    def _blocks(self, plan: Plan) -> tuple[PartMemory, ...]:
        computed = self.computed
        again, otherwise = modes_of(plan.activation_checkpointing)
        if again == "selective" and computed.runtime.every_second_matmul:
            again = "every_second_matmul"
        found = []
        for block, kind in enumerate(computed.workload.model.blocks):
            mode = again if is_checkpointed(plan.activation_checkpointing, block) else otherwise
            found.append(computed.block(plan, kind, checkpointing=mode, first=block == 0))
        return tuple(found)

    def _make_sharding(self, plan: Plan, hidden: int) -> Sharding:
        computed, model = self.computed, self.computed.workload.model
        kinds = unit_kinds(computed.workload, plan)
        facts = self._facts(plan, kinds)
        optimizer = self._optimizer(plan, kinds)
        cache = kept_cache(computed.workload, computed.runtime, hidden)
        terms = sharding_terms(computed.runtime, facts, optimizer, hidden_bytes=hidden, cache_bytes=cache)
        first = next((place for place, unit in enumerate(facts.units) if unit.block_kind is not None), 0)
        blocks = facts.units[first : first + model.layers]
        return Sharding(
            facts=facts,
            terms=terms,
            resting=terms.at_rest(),
            twice_loaded=_tied_shard(kinds, model),
            first_block=first,
            alike=_alike(blocks, first_apart=facts.late is not None),
        )

    def _facts(self, plan: Plan, kinds: tuple[UnitKind, ...]) -> Facts:
        """Return the units in bytes, which only differ where the kinds do, or where shards lie."""
        key = (id(kinds), plan.offload.parameters)  # an entry keeps the kinds alive, so their id stays theirs
        found = self._known_facts.get(key)
        if found is None:
            computed = self.computed
            facts = facts_of(computed.workload.model, kinds, plan, computed.device_type)
            facts = quantized_facts(facts, kinds, computed.runtime.base_quantization)
            found = remember(self._known_facts, key, (facts, kinds), most=_REMEMBERED)
        return replace(found[0], plan=plan)

    def _optimizer(self, plan: Plan, kinds: tuple[UnitKind, ...]) -> OptimizerBytes:
        offload = plan.offload
        how = (plan.optimizer, plan.optimizer_implementation, plan.dtypes.optimizer_state)
        key = (id(kinds), *how, offload.optimizer, offload.parameters)
        found = self._optimizers.get(key)
        if found is None:
            tensors = _in_order(kinds, self.computed.workload.model, each=by_buckets(plan))
            made = optimizer_bytes(tensors, plan, self.computed.device_type)
            found = remember(self._optimizers, key, (made, kinds), most=_REMEMBERED)
        return found[0]


def _in_order(kinds: Sequence[UnitKind], model: ModelSpec, *, each: bool) -> list[tuple[UnitTensor, int]]:
    """Return all parameters in the order of the model, the embedding first: `each`, or with how often it occurs."""
    inner = [kind for kind in kinds if kind.block_kind is not None]
    if each:
        by_block = {block: kind for kind in inner for block in kind.blocks}
        blocks = [(tensor, 1) for block in sorted(by_block) for tensor in by_block[block].tensors]
    else:
        blocks = [(tensor, kind.count) for kind in inner for tensor in kind.tensors]
    outside = [(tensor, 1) for kind in kinds if kind.block_kind is None for tensor in kind.tensors]
    embeds = [entry for entry in outside if entry[0].name.startswith(f"{model.embedding}.")]
    return [*embeds, *blocks, *(entry for entry in outside if entry not in embeds)]


def _tied_shard(kinds: Sequence[UnitKind], model: ModelSpec) -> int:
    """Return the bytes of a shard that two modules hold: `to_empty` makes it anew for each."""
    if not model.tied:
        return 0
    name = f"{model.embedding}.weight"
    outside = (tensor for kind in kinds if kind.block_kind is None for tensor in kind.tensors)
    return sum(tensor.rank_elements * DTYPE_BYTES[tensor.dtype] for tensor in outside if tensor.name == name)


def _alike(blocks: Sequence[PlacedUnit], *, first_apart: bool) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of blocks that are alike; the first is not like others where no gradient flows into it."""
    groups: dict[tuple[int, bool], list[int]] = {}
    for block, unit in enumerate(blocks):
        groups.setdefault((id(unit), first_apart and block == 0), []).append(block)
    return tuple(tuple(group) for group in groups.values())


def highest(step: Step) -> dict[Phase, Candidate]:
    """Return the highest instant of each phase."""
    best: dict[Phase, tuple[int, Candidate]] = {}
    for candidate, size in _sizes(step):
        if candidate.phase not in best or size > best[candidate.phase][0]:
            best[candidate.phase] = (size, candidate)
    return {phase: candidate for phase, (_, candidate) in best.items()}


def peak(step: Step) -> int:
    """Return the highest bytes on the device at any instant."""
    return max(size for _, size in _sizes(step))


def _sizes(step: Step) -> Iterator[tuple[Candidate, int]]:
    """Yield every instant with its bytes on the device."""
    sharding, workspace, inputs = step.sharding, step.workspace, step.inputs
    evaluated = step.parts.evaluated_ends.inputs
    known = sharding.totals
    for candidate in candidates(step):
        _, at, kept, computed, waiting = candidate
        held = known.get(at)
        if held is None:
            held = sharding.total(at)
        batch = evaluated if at.evaluating else inputs
        yield candidate, held + kept + computed.total + waiting + workspace + batch


def loaded(step: Step) -> Live:
    """Return the live bytes at the end of loading: no optimizer yet, and tied weights for a moment twice."""
    live = dict(step.sharding.resting)
    live.pop("optimizer_states", None)
    return together(live, {"temporaries": step.workspace + step.sharding.twice_loaded})


def live_at(step: Step, candidate: Candidate) -> Live:
    """Return the live bytes of one instant by category."""
    at, computed = candidate.at, candidate.computed
    held: Live = {
        "activations": candidate.kept + computed.activations,
        "recomputed_activations": computed.recomputed,
        "temporaries": computed.temporaries + step.workspace,
        "unsharded_gradients": computed.gradients,
        "logits_and_loss": computed.logits,
        "inputs": step.parts.evaluated_ends.inputs if at.evaluating else step.inputs,
    }
    if candidate.phase == "forward":
        held["activations"] += candidate.waiting
    else:
        held["temporaries"] += candidate.waiting
    if at.evaluating:  # without gradients nothing is kept for backward
        held["temporaries"] += held.pop("activations")
    if at.moment == "head_backward" and step.parts.pieces > 2:
        _name_sum(held, step.sharding.facts.head_gradient)
    sharding = step.sharding.live(at)
    if step.parts.pieces > 1 and step.plan.mesh.tensor == 1:
        _name_sum(sharding, sharding.get("logits_and_loss", 0))
    return together(held, sharding)


def _name_sum(live: Live, size: int) -> None:
    """Call a gradient of the head what it becomes: a sum over pieces of the loss is made in the gradient's own memory,
    while what a single piece gives belongs to the loss."""
    moved = min(size, live.get("logits_and_loss", 0))
    live["logits_and_loss"] = live.get("logits_and_loss", 0) - moved
    live["unsharded_gradients"] = live.get("unsharded_gradients", 0) + moved


def where(step: Step, at: At) -> str:
    """Return the name of the unit at work."""
    first, units = step.sharding.first_block, step.sharding.facts.units
    if at.moment == "step":
        return "optimizer"
    if at.unit == ROOT:
        return "loss" if at.moment in ("head", "loss", "head_backward") else "root"
    block = at.unit - first
    return f"{step.block_list}.{block}" if 0 <= block < len(step.parts.blocks) else units[at.unit].name
