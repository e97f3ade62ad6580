"""Throughput from the time of a step: tokens per second, shares of the cards' peak, cost. No torch.

throughput_of(timeline, workload, plan, cluster).mfu
"""

from __future__ import annotations

from shardwise.predict.adapted import Adapted, Parameter, Scope, adapted_model, lies_in
from shardwise.predict.pace import pace_of
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import is_checkpointed
from shardwise.spec.model_spec import BlockKind, ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.runtime import SHARDWISE
from shardwise.spec.throughput import Flops, Price, Throughput
from shardwise.spec.timeline import Timeline
from shardwise.spec.workload import Workload

FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = 2, 2, 2
"""FLOPs of each per token and element of a weight: one multiplication and one addition."""
ATTENTION_PRODUCTS = 3
"""An attention's backward has twice the products of its forward, and so counts three times with it."""


def throughput_of(
    timeline: Timeline, workload: Workload, plan: Plan, cluster: Cluster, price: Price | None = None
) -> Throughput:
    """Return what a step's time comes to.

    Args:
        timeline: One step of the plan.
        workload: What it computes.
        plan: How it is laid out.
        cluster: Where it runs.
        price: What cards cost; None: not known.

    Raises:
        BadInput: adapters that the model cannot have.
    """
    return Throughput(
        step_s=timeline.step_s,
        tokens=plan.global_batch * workload.seq_len,
        gpus=plan.mesh.world,
        flops=flops_of_step(workload, plan),
        peak_flops=peak_flops(cluster, plan),
        price_per_gpu_hour=None if price is None else price.per_gpu_hour(cluster.per_node),
    )


def peak_flops(cluster: Cluster, plan: Plan) -> float | None:
    """Return FLOPs per second of one device in dense matrix products of the plan's dtype of computation: by its vendor,
    on CPUs the best that a probe measured. None where nothing is known.

    Raises:
        BadInput: a probe that did not measure that dtype.
    """
    if cluster.measured is None and (cluster.gpu is None or cluster.gpu.rates is None):
        return None
    return pace_of(cluster, SHARDWISE, compiled=plan.compile, dtype=plan.dtypes.param).peak_flops


def flops_of_step(workload: Workload, plan: Plan) -> Flops:
    """Return the FLOPs of one optimizer step over all ranks, of matrix products and attention.

    A weight costs 2 FLOPs per token in forward, 2 for the gradient of its input, and 2 more where it trains; of routed
    experts those that a token goes through count. Attention costs 2 x heads x (key + value dimension) x length per
    token in forward, the whole square of a row or window, and twice that in backward. Looking up embeddings costs none.
    What is done again: forward of every block that is recomputed whole (`selective` keeps products and attention), and
    the head's forward of a chunked loss.

    Raises:
        BadInput: adapters that the model cannot have.
    """
    model = workload.model
    adapted = adapted_model(model, workload.lora, tensor=plan.mesh.tensor)
    forward, needed = zip(*(_block(scope, model, kind, workload) for scope, kind in _variants(adapted)), strict=True)
    head_forward, head_needed = _head(model, adapted.outside)
    again = 0.0 if plan.loss_head != "chunked" else head_forward
    if plan.activation_checkpointing != "selective":
        setting = plan.activation_checkpointing
        again += sum(forward[place] for index, place in enumerate(adapted.blocks) if is_checkpointed(setting, index))
    tokens = plan.global_batch * workload.seq_len
    per_token = head_needed + sum(needed[place] for place in adapted.blocks)
    return Flops(model=tokens * per_token, again=tokens * again)


def _variants(adapted: Adapted) -> list[tuple[Scope, int]]:
    return list(zip(adapted.variants, adapted.kinds, strict=True))


def _block(scope: Scope, model: ModelSpec, place: int, workload: Workload) -> tuple[float, float]:
    """Return FLOPs per token of a block: of its forward, and of forward and backward."""
    kind = model.kinds[place]
    matrices = [parameter for parameter in scope.parameters if _multiplies(parameter, scope)]
    elements, trained = _elements(matrices), _elements([one for one in matrices if one.trained])
    idle = _idle(kind, model.hidden)
    if workload.lora is None:
        trained -= idle
    linear = elements - idle
    attention = _attention(kind, workload.seq_len)
    forward = FORWARD * linear + attention
    backward = INPUT_GRADIENT * linear + WEIGHT_GRADIENT * trained
    return forward, FORWARD * linear + backward + ATTENTION_PRODUCTS * attention


def _multiplies(parameter: Parameter, scope: Scope) -> bool:
    """Tell whether a parameter is a matrix that hidden states go through."""
    return len(parameter.shape) > 1 and not any(lies_in(parameter.name, name) for name in scope.unreached)


def _elements(parameters: list[Parameter]) -> int:
    total = 0
    for parameter in parameters:
        size = 1
        for length in parameter.shape:
            size *= length
        total += size
    return total


def _idle(kind: BlockKind, hidden: int) -> int:
    """Return the elements of routed experts that a token does not go through."""
    if not kind.mlp.experts:
        return 0
    per_expert = (3 if kind.mlp.gated else 2) * hidden * kind.mlp.width
    return (kind.mlp.experts - kind.mlp.active) * per_expert


def _attention(kind: BlockKind, length: int) -> float:
    """Return the FLOPs per token of an attention's forward."""
    one = kind.attention
    seen = length if one.window is None else min(length, one.window)
    return FORWARD * one.heads * (one.head_dim + one.value_dim) * seen


def _head(model: ModelSpec, outside: Scope) -> tuple[float, float]:
    """Return FLOPs per token of the head, with adapters on it: of its forward, and of forward and backward."""
    weight = model.hidden * model.vocab
    names = (model.head, model.embedding) if model.tied else (model.head,)
    own = [one for one in outside.parameters if any(lies_in(one.name, name) for name in names)]
    added = _elements([one for one in own if "lora_" in one.name and lies_in(one.name, model.head)])
    trains = any(one.trained and "lora_" not in one.name for one in own)
    linear = weight + added
    trained = added + (weight if trains else 0)
    forward = FORWARD * linear
    return forward, forward + INPUT_GRADIENT * linear + WEIGHT_GRADIENT * trained
