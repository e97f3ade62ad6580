"""The largest contiguous piece of memory of a step."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.predict.terms.step import Step
from shardwise.predict.terms.unit_bytes import own_vocab
from shardwise.spec.footprint import Category, LargestBuffer
from shardwise.spec.runtime import Runtime
from shardwise.spec.strict import DTYPE_BYTES
from shardwise.spec.workload import HELD_OUT_PER_TRAINED, Workload


def largest_buffer(step: Step, workload: Workload, runtime: Runtime) -> LargestBuffer:
    """Return the largest of what collectives, weights, logits and blocks need in one piece."""
    pieces = [*_of_units(step), *_of_computation(step, workload, runtime)]
    size, category, where = max(pieces, key=lambda piece: piece[0])
    return LargestBuffer(bytes=size, category=category, where=where)


def _of_units(step: Step) -> Iterator[tuple[int, Category, str]]:
    facts = step.sharding.facts
    yield facts.whole_embedding + facts.embedding_gradient, "unsharded_gradients", "root"
    for unit, name in [*((unit.bytes, unit.name) for unit in facts.units), (facts.root, "root")]:
        if facts.plan.mesh.shard > 1:
            yield unit.gathered, "all_gather_buffers", name
        yield unit.reduced, "reduce_scatter_buffers", name
        yield unit.gradient_shards, "sharded_gradients", name
        yield unit.widest, "unsharded_parameters", name


def _of_computation(step: Step, workload: Workload, runtime: Runtime) -> Iterator[tuple[int, Category, str]]:
    """Logits in fp32 (of a chunk, where they are made in chunks; whole on every rank of a tensor group unless the loss
    is split too), a block's widest hidden state, attention scores."""
    plan, model = step.plan, workload.model
    vocab = own_vocab(model, plan, runtime)
    tokens, split = plan.micro_batch * workload.seq_len, plan.mesh.tensor
    forwards = HELD_OUT_PER_TRAINED if workload.held_out else 1
    evaluated = forwards * tokens
    if plan.loss_head == "eager":
        yield evaluated * vocab * 4, "logits_and_loss", "loss"
    elif plan.loss_head == "chunked":
        yield min(evaluated, plan.loss_chunk) * vocab * 4, "logits_and_loss", "loss"
    item = DTYPE_BYTES[plan.dtypes.param]
    for kind in model.kinds:
        yield evaluated * max(model.hidden, kind.mlp.width // split) * item, "temporaries", model.block_list
        if plan.attention == "eager":
            scores = forwards * plan.micro_batch * kind.attention.heads // split * workload.seq_len**2
            yield scores * 4, "temporaries", model.block_list
