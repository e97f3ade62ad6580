"""Mesh and resharding of a Plan: what a strategy's name means on this many ranks."""

from __future__ import annotations

from shardwise.spec.job import Job
from shardwise.spec.layout import AccumulationMode, Mesh, StrategyName
from shardwise.spec.problems import BadInput, Problem

RESHARDS: dict[StrategyName, bool] = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
    "NO_SHARD": True,
}
"""Whether gathered weights are freed after forward. NO_SHARD gathers nothing; there it frees FSDP2's working copy."""

_PLAIN: dict[StrategyName, StrategyName] = {"HYBRID_SHARD": "FULL_SHARD", "HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP"}
"""Strategy with replicas -> the same without."""


def decide_mesh(job: Job, strategy: StrategyName, world: int, ranks_per_node: int, reasons: dict[str, str]) -> Mesh:
    """Return the mesh of `world` ranks.

    Raises:
        BadInput: axes that do not divide the ranks or contradict the strategy, with the sizes that would do.
    """
    asked = job.mesh
    if world % asked.tensor:
        raise _refused("mesh.tensor", asked.tensor, f"does not divide {world} ranks", f"use {_divisors(world)}")
    if asked.sequence_parallel and asked.tensor == 1:
        raise _refused("mesh.sequence_parallel", True, "needs mesh.tensor above 1", "set mesh.tensor, or remove it")
    ranks = world // asked.tensor
    replicate, shard = _axes(job, strategy, ranks, ranks_per_node // asked.tensor, reasons)
    if replicate * shard != ranks:
        by_tensor = f" / tensor {asked.tensor}" if asked.tensor > 1 else ""
        reason = f"replicate {replicate} x shard {shard} is {replicate * shard}, not {world} ranks{by_tensor} = {ranks}"
        raise _refused("mesh", {"replicate": replicate, "shard": shard}, reason, _usable(ranks, strategy, asked.tensor))
    return Mesh(replicate=replicate, shard=shard, tensor=asked.tensor, sequence_parallel=asked.sequence_parallel)


def _axes(
    job: Job, strategy: StrategyName, ranks: int, ranks_per_node: int, reasons: dict[str, str]
) -> tuple[int, int]:
    """Return (replicate, shard)."""
    replicate, shard = job.mesh.replicate, job.mesh.shard
    if strategy == "NO_SHARD":
        if shard not in (None, 1):
            raise _refused("mesh.shard", shard, "contradicts NO_SHARD, which shards nothing", "use HYBRID_SHARD")
        return replicate or ranks, 1
    if strategy not in _PLAIN:
        if replicate not in (None, 1):
            hybrid = "HYBRID_SHARD" if strategy == "FULL_SHARD" else "HYBRID_SHARD_ZERO2"
            raise _refused("mesh.replicate", replicate, f"contradicts {strategy}", f"set fsdp to {hybrid}")
        return 1, shard or ranks
    if replicate is None and shard is None:
        if ranks_per_node >= ranks or ranks_per_node <= 1 or ranks % ranks_per_node:
            reason = f"needs mesh.replicate and mesh.shard: {ranks} ranks do not lie on several equal nodes"
            raise _refused("fsdp", strategy, reason, _usable(ranks, strategy, job.mesh.tensor))
        reasons["mesh"] = f"{strategy}: shards inside a node of {ranks_per_node} ranks, replicas over nodes"
        shard = ranks_per_node
    replicate = replicate or max(1, ranks // (shard or 1))
    shard = shard or max(1, ranks // replicate)
    if 1 in (replicate, shard) and replicate * shard == ranks:
        plain = "NO_SHARD" if shard == 1 else _PLAIN[strategy]
        reason = f"{strategy} on replicate {replicate} x shard {shard} is {plain}"
        raise _refused("mesh", {"replicate": replicate, "shard": shard}, reason, f"set fsdp to {plain}")
    return replicate, shard


def decide_reshard(job: Job, strategy: StrategyName, mesh: Mesh) -> bool | int:
    """Return what becomes of gathered weights after forward: freed, kept, or kept in groups of that many ranks.

    Raises:
        BadInput: it contradicts the strategy, or a group size does not divide the shard axis.
    """
    asked = job.fsdp.reshard_after_forward
    if asked is None or (strategy == "NO_SHARD" and isinstance(asked, bool)):
        return RESHARDS[strategy] if asked is None else asked
    field = "fsdp.reshard_after_forward"
    if strategy == "NO_SHARD" or RESHARDS[strategy] is not (asked is not False):
        others = [
            name for name, reshards in RESHARDS.items() if reshards is (asked is not False) and name != "NO_SHARD"
        ]
        raise _refused(field, asked, f"contradicts {strategy}", f"remove it, or set fsdp to {' or '.join(others)}")
    if isinstance(asked, bool):
        return asked
    if mesh.tensor > 1:
        reason = "torch does not reshard to smaller groups what tensor parallelism has split"
        raise _refused(field, asked, reason, "write true, or remove mesh.tensor")
    proper = [size for size in range(2, mesh.shard) if mesh.shard % size == 0]
    if asked not in proper:
        fix = f"use {' or '.join(map(str, proper))}, or write true" if proper else "write true"
        if asked == mesh.shard:
            raise _refused(field, asked, f"is the whole shard axis of {mesh.shard} ranks, which true says", fix)
        raise _refused(field, asked, f"does not divide the shard axis of {mesh.shard} ranks", fix)
    return asked


def decide_accumulation(job: Job, mesh: Mesh) -> AccumulationMode:
    """Return what is reduced before the last micro-batch.

    Raises:
        BadInput: replicas were to be left for last where there are none.
    """
    if job.accumulation == "defer_replicate" and mesh.replicate == 1:
        reason = f"needs replicas: the mesh is replicate 1 x shard {mesh.shard}"
        fix = "write reduce_each or defer_all, or set fsdp to HYBRID_SHARD or HYBRID_SHARD_ZERO2"
        raise _refused("accumulation", job.accumulation, reason, fix)
    return job.accumulation


def _refused(field: str, value: object, reason: str, fix: str) -> BadInput:
    return BadInput(Problem(field=field, value=value, reason=reason, fix=fix))


def _divisors(number: int) -> str:
    return " or ".join(str(size) for size in range(1, number + 1) if number % size == 0)


def _usable(ranks: int, strategy: StrategyName, tensor: int) -> str:
    """Return the remedy that names meshes which `ranks` data ranks could have under a strategy."""
    last = f", tensor: {tensor}" if tensor > 1 else ""
    if strategy == "NO_SHARD":
        return f"use mesh: {{replicate: {ranks}{last}}}"
    if strategy not in _PLAIN:
        return f"use mesh: {{shard: {ranks}{last}}}"
    sizes = [size for size in range(2, ranks) if ranks % size == 0]
    if not sizes:
        plain = _PLAIN[strategy] if ranks > 1 else "NO_SHARD"
        return f"set fsdp to {plain} and remove mesh sizes: {ranks} is not a product of two sizes above 1"
    return "use mesh: " + " or ".join(f"{{replicate: {ranks // size}, shard: {size}{last}}}" for size in sizes[-3:])
