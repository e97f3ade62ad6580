"""The computation of a workload: its blocks and its ends under any plan, each walked once and remembered."""

from __future__ import annotations

from dataclasses import replace

from shardwise.predict.blocks.ends import walk_ends
from shardwise.predict.blocks.families import Family, family_of
from shardwise.predict.blocks.live import EndsMemory, PartMemory
from shardwise.predict.blocks.setting import Device, Mode, Setting
from shardwise.predict.blocks.sites import Weights
from shardwise.predict.blocks.walk import walk
from shardwise.predict.remembered import remember
from shardwise.spec.plan import Plan
from shardwise.spec.runtime import Runtime
from shardwise.spec.strict import DTYPE_BYTES
from shardwise.spec.workload import Workload

"""Bytes of an element."""

_Key = tuple[object, ...]


class Computation:
    """What one workload computes, run by one program on one kind of device.

    Raises:
        BadInput: a model whose blocks are not known by formula.
    """

    def __init__(self, workload: Workload, runtime: Runtime, device_type: Device, generation: str) -> None:
        self.workload, self.runtime, self.device_type, self.generation = workload, runtime, device_type, generation
        self.family: Family = family_of(workload.model)
        self._weights: dict[int, Weights] = {}
        self.weights(1)
        self._blocks: dict[_Key, PartMemory] = {}
        self._ends: dict[_Key, EndsMemory] = {}

    def block(self, plan: Plan, kind: int, *, checkpointing: Mode, first: bool = False) -> PartMemory:
        """Return what one block holds.

        Args:
            plan: The plan; `activation_checkpointing` is not read.
            kind: Place of the block's kind in `ModelSpec.kinds`.
            checkpointing: What this block computes again in backward.
            first: It is the model's first block: of a frozen model, no gradient flows into its input.
        """
        key = (*_key(plan), kind, checkpointing, first)
        found = self._blocks.get(key)
        if found is None:
            weights = self.weights(plan.mesh.tensor)
            found = self._blocks[key] = walk(
                self.family.block,
                weights.kinds[kind],
                self.setting(plan),
                checkpointing,
                first=first,
                frozen=first and self._ends_gradient(weights),
                offload=plan.offload.activations,
                beside=0 if first else self._returned(plan, kind),
            )
        return found

    def ends(self, plan: Plan) -> EndsMemory:
        """Return what the model holds outside its blocks."""
        again = plan.activation_checkpointing != "none"
        key = (*_key(plan), plan.loss_head, plan.loss_chunk, plan.dtypes.output, again)
        found = self._ends.get(key)
        if found is None:
            found = self._ends[key] = walk_ends(
                self.family,
                self.weights(plan.mesh.tensor).outside,
                self.workload.model,
                replace(self.setting(plan), compiled=False),
                loss="kernel" if self.runtime.fused_loss and plan.loss_head == "eager" else plan.loss_head,
                chunk=plan.loss_chunk,
                output=DTYPE_BYTES[plan.dtypes.output],
                again=again,
            )
        return found

    def setting(self, plan: Plan) -> Setting:
        """Return a plan as the computation sees it."""
        return Setting(
            rows=plan.micro_batch,
            length=self.workload.seq_len,
            item=DTYPE_BYTES[plan.dtypes.param],
            device=self.device_type,
            generation=self.generation,
            attention=plan.attention,
            padded=self.workload.padded,
            tensor=plan.mesh.tensor,
            sequence_parallel=plan.mesh.sequence_parallel,
            fused_norms=self.runtime.fused_norms,
            compiled=self.runtime.compiled or plan.compile,
            program=self.runtime,
            adds_gradients=adds_gradients(plan),
        )

    def _ends_gradient(self, weights: Weights) -> bool:
        """Whether no gradient flows into the first block; reentrant checkpointing needs one, so programs ask for it."""
        trains = f"{self.workload.model.embedding}.weight" in weights.outside.trained
        return not trains and not self.runtime.reentrant

    def _returned(self, plan: Plan, kind: int) -> int:
        """Bytes of the weights of attention that the block before has returned."""
        if not self.family.returns_weights or plan.attention != "eager":
            return 0
        heads = self.workload.model.kinds[kind].attention.heads // plan.mesh.tensor
        return plan.micro_batch * heads * self.workload.seq_len**2 * DTYPE_BYTES[plan.dtypes.param]

    def weights(self, ranks: int) -> Weights:
        """Return the model's parameters on one of `ranks` ranks of a tensor axis."""
        found = self._weights.get(ranks)
        if found is None:
            model, lora = self.workload.model, self.workload.lora
            found = self._weights[ranks] = Weights(model, lora, ranks, self.family)
        return found


def _key(plan: Plan) -> _Key:
    mesh = plan.mesh
    return (
        plan.micro_batch,
        plan.dtypes.param,
        plan.attention,
        mesh.tensor,
        mesh.sequence_parallel,
        plan.compile,
        plan.offload.activations,
        adds_gradients(plan),
    )


def adds_gradients(plan: Plan) -> bool:
    """Whether whole gradients of several micro-batches are added up by autograd itself, as they arrive."""
    deferred = plan.accumulation_steps > 1 and plan.accumulation_mode == "defer_all"
    return deferred and plan.dtypes.reduce == plan.dtypes.param


_REMEMBERED = 64
"""Computations that are kept; the oldest goes first."""

_computations: dict[tuple[int, int, str, str], Computation] = {}


def computation(workload: Workload, runtime: Runtime, device_type: Device, generation: str = "ampere") -> Computation:
    """Return the computation of a workload; the same objects give the same one, with all that it has walked.

    Args:
        workload: What is computed.
        runtime: By which program.
        device_type: On what.
        generation: Generation of the card (`predict.workspace.generation`): kernels differ.

    Raises:
        BadInput: a model whose blocks are not known by formula.
    """
    # A Computation keeps workload and runtime alive, so their ids stay theirs.
    key = (id(workload), id(runtime), device_type, generation)
    found = _computations.get(key)
    if found is None:
        found = Computation(workload, runtime, device_type, generation)
        remember(_computations, key, found, most=_REMEMBERED)
    return found


def modes_of(setting: str) -> tuple[Mode, Mode]:
    """Return what checkpointed blocks do under a Plan's `activation_checkpointing`, and what the others do."""
    if setting == "selective":
        return "selective", "none"
    return ("none" if setting == "none" else "full"), "none"
