"""Settings of the layout and of the optimizer that are each fine and cannot hold together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwise.spec.chosen import Chosen
from shardwise.spec.problems import Problem

_FREEING = {"FULL_SHARD": "SHARD_GRAD_OP", "HYBRID_SHARD": "HYBRID_SHARD_ZERO2"}
"""Strategy that frees gathered weights after forward -> the same that keeps them."""
_KEEPING = {keeping: freeing for freeing, keeping in _FREEING.items()}
_HYBRID = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "HYBRID_SHARD_ZERO2"}
"""Strategy without replicas -> the same with them."""


def implied(chosen: Mapping[str, Chosen]) -> dict[str, Chosen]:
    """Return what chosen settings bring with them: the optimizer runs where its parameters are."""
    parameters, states = chosen.get("offload.parameters"), chosen.get("offload.optimizer")
    named = states is not None and states.given.target == "offload.optimizer"
    if parameters is not None and parameters.value is True and not named:
        return {"offload.optimizer": Chosen(True, parameters.given)}
    return {}


def of_layout(given: Mapping[str, Chosen]) -> Iterator[Problem]:
    """Yield the contradictions between strategy, mesh, offload, accumulation and loss."""
    yield from _resharding(given)
    yield from _mesh(given)
    yield from _replicas(given)
    parameters, states = given.get("offload.parameters"), given.get("offload.optimizer")
    if parameters and parameters.value is True and states and states.value is False:
        fix = "remove it: the optimizer runs where the parameters are"
        yield states.given.problem(f"contradicts {parameters}", fix=fix)
    chunk, head = given.get("loss_chunk"), given.get("loss_head")
    if chunk and not head:
        fix = "set loss_head: chunked, or remove it"
        yield chunk.given.problem("has no effect without loss_head: chunked", fix=fix)
    elif chunk and head and head.value in ("eager", "fused"):
        yield chunk.given.problem(f"contradicts {head}", fix="set loss_head: chunked, or remove loss_chunk")


def _resharding(given: Mapping[str, Chosen]) -> Iterator[Problem]:
    reshard, strategy = given.get("fsdp.reshard_after_forward"), given.get("fsdp.strategy")
    if not reshard or not strategy or not (isinstance(reshard.value, bool) or reshard.at_least(2)):
        return
    others = _FREEING if reshard.value is False else _KEEPING
    if strategy.value == "NO_SHARD":
        yield reshard.given.problem(f"contradicts {strategy}", fix="remove it: NO_SHARD gathers nothing")
    elif str(strategy.value) in others:
        fix = f"remove it, or set the strategy to {others[str(strategy.value)]}"
        yield reshard.given.problem(f"contradicts {strategy}", fix=fix)


def _mesh(given: Mapping[str, Chosen]) -> Iterator[Problem]:
    replicate, shard, strategy = (given.get(key) for key in ("mesh.replicate", "mesh.shard", "fsdp.strategy"))
    if strategy and shard and strategy.value == "NO_SHARD" and shard.at_least(2):
        fix = "remove it, or set the strategy to FULL_SHARD, or to HYBRID_SHARD for replicas of shards"
        yield shard.given.problem(f"contradicts {strategy}, which shards nothing", fix=fix)
    if strategy and replicate and str(strategy.value) in _HYBRID and replicate.at_least(2):
        fix = f"remove it, or set the strategy to {_HYBRID[str(strategy.value)]}"
        yield replicate.given.problem(f"contradicts {strategy}, which has no replicas", fix=fix)
    sequence, tensor = given.get("mesh.sequence_parallel"), given.get("mesh.tensor")
    if sequence and sequence.value is True and (tensor is None or tensor.value == 1):
        reason = f"contradicts {tensor}" if tensor else "needs mesh.tensor above 1"
        yield sequence.given.problem(reason, fix="set mesh.tensor to 2 or more, or remove it")


def _replicas(given: Mapping[str, Chosen]) -> Iterator[Problem]:
    mode, strategy, replicate = (given.get(key) for key in ("accumulation", "fsdp.strategy", "mesh.replicate"))
    if mode is None or mode.value != "defer_replicate":
        return
    if strategy and str(strategy.value) in _HYBRID:
        fix = f"write reduce_each or defer_all, or set the strategy to {_HYBRID[str(strategy.value)]}"
        yield mode.given.problem(f"contradicts {strategy}, which has no replicas", fix=fix)
    elif replicate and replicate.value == 1:
        fix = "write reduce_each or defer_all, or set mesh.replicate to 2 or more"
        yield mode.given.problem(f"contradicts {replicate}", fix=fix)


def of_optimizer(given: Mapping[str, Chosen]) -> Iterator[Problem]:
    """Yield the contradictions between an optimizer and its options."""
    optimizer, momentum = given.get("optimizer"), given.get("momentum")
    name = optimizer.value if optimizer else "adamw"
    has_momentum = momentum is not None and momentum.value != 0
    if momentum and has_momentum and name in ("adamw", "adamw_8bit"):
        reason = f"contradicts {optimizer}" if optimizer else "has no effect without optimizer: sgd"
        yield momentum.given.problem(reason, fix="set optimizer: sgd, or remove momentum")
    states, implementation = given.get("optimizer_state_dtype"), given.get("optimizer_implementation")
    if optimizer and name == "adamw_8bit":
        if states:
            yield states.given.problem(f"contradicts {optimizer}", fix="remove it: its states have 8 bits")
        if implementation:
            fix = "remove it: the 8-bit optimizer has its own"
            yield implementation.given.problem(f"contradicts {optimizer}", fix=fix)
        on_host, parameters = given.get("offload.optimizer"), given.get("offload.parameters")
        if on_host and on_host.value is True and not (parameters and parameters.value is True):
            fix = "set optimizer: adamw, or offload: parameters, or remove it"
            yield on_host.given.problem(f"contradicts {optimizer}, whose states stay on the device", fix=fix)
    if optimizer and states and name == "sgd" and not has_momentum:
        fix = "set momentum, or remove optimizer_state_dtype"
        yield states.given.problem(f"has no effect with {optimizer} without momentum, which keeps no states", fix=fix)
