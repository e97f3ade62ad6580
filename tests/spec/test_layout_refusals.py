"""Wrong or contradictory settings of layout, loss and optimizer are refused with both names and a way out."""

from __future__ import annotations

import pytest

from shardwise.spec.problems import BadInput
from shardwise.spec.reader import read_job

NEEDED = "model: m\ndata: d.jsonl\n"


def problems_of(text: str, *overrides: str) -> list:
    with pytest.raises(BadInput) as caught:
        read_job(None, overrides, text=NEEDED + text)
    return list(caught.value.problems)


BAD = [
    # text, field, words
    ("fsdp: hybrd_shard", "fsdp", "did you mean 'hybrid_shard'?"),
    ("fsdp: full_shard sync_states", "fsdp", "no_shard (DDP); options: auto_wrap, offload, cpu_offload"),
    ("fsdp: full_shard hsdp", "fsdp", "FULL_SHARD and HYBRID_SHARD"),
    ("fsdp: full_shard ofload", "fsdp", "did you mean 'offload'?"),
    ("fsdp: full_shard backward_post", "fsdp", "has no order in between; write backward_pre"),
    ("fsdp: backward_pre no_prefetch", "fsdp", "backward_pre and no_prefetch; keep one of the two"),
    ("fsdp: {strategy: offload}", "fsdp.strategy", "is not a strategy"),
    ("fsdp: {reshard_after_forward: 1}", "fsdp.reshard_after_forward", "means false"),
    ("fsdp: {reshard_after_forward: 0}", "fsdp.reshard_after_forward", "true or false or a whole number of 2 or more"),
    ("fsdp: {reshard_after_forward: FULL_SHARD}", "fsdp.reshard_after_forward", "must be true or false"),
    ("fsdp: {meshh: {shard: 2}}", "fsdp.meshh", "did you mean 'mesh'?"),
    ("fsdp: {mesh: {shards: 2}}", "fsdp.mesh.shards", "did you mean 'shard'?"),
    ("mesh: 4", "mesh", "allowed: replicate, shard, tensor, sequence_parallel"),
    ("mesh:", "mesh", "must be a mapping"),
    ("mesh: {shard: 0}", "mesh.shard", "must be a whole number above 0"),
    ("mesh: {shard: auto}", "mesh.shard", "must be a whole number above 0"),
    ("mesh: {dp: 2}", "mesh.dp", "allowed: replicate, shard, tensor, sequence_parallel"),
    ("shard: 2", "shard", "write 'mesh.shard'"),
    ("units: {embedding: alone}", "units.embedding", "allowed: root, own"),
    ("units: {wrap: [1]}", "units.wrap", "a list of class names"),
    ("units: {wrap: ['']}", "units.wrap", "an item that is empty text"),
    ("units: {wrap: ','}", "units.wrap", "a list of class names"),
    ("units: 3", "units", "must be class names"),
    ("fsdp_transformer_layer_cls_to_wrap: ''", "fsdp_transformer_layer_cls_to_wrap", "is empty text"),
    ("prefetch: -1", "prefetch", "must be a whole number of 0 or more"),
    ("prefetch: 99999999999999999999", "prefetch", "too large"),
    ("prefetch: far", "prefetch", "must be a depth in units, or a mapping"),
    ("prefetch:", "prefetch", "must be a depth in units"),
    ("prefetch: {backward: -1}", "prefetch.backward", "must be a whole number of 0 or more"),
    ("fsdp: {backward_prefetch: BACKWARD_POST}", "fsdp.backward_prefetch", "has no order in between"),
    ("fsdp: {backward_prefetch: backward_pree}", "fsdp.backward_prefetch", "must be a whole number of 0 or more"),
    ("fsdp: {backward_prefetch: null}", "fsdp.backward_prefetch", "has no value"),
    ("fsdp: {forward_prefetch: backward_pre}", "fsdp.forward_prefetch", "must be a whole number of 0 or more"),
    ("reduce_scatter: 2", "reduce_scatter", "allowed: buffers, separate_group, asynchronous"),
    ("reduce_scatter: {buffers: 0}", "reduce_scatter.buffers", "must be a whole number above 0"),
    ("offload: true", "offload", "does not say what to offload; allowed: none, optimizer, parameters, activations"),
    ("offload: cpu", "offload", "allowed: none, optimizer"),
    ("offload: optimiser", "offload", "did you mean 'optimizer'?"),
    ("offload: []", "offload", "must say what to offload"),
    ("offload:", "offload", "must say what to offload"),
    ("offload: [none, optimizer]", "offload", "write none alone"),
    ("offload: [optimizer, 1]", "offload", "must say what to offload"),
    ("offload: {gradients: true}", "offload.gradients", "allowed: optimizer, parameters, activations"),
    ("accumulation: 4", "accumulation", "global_batch = micro_batch x accumulation x ranks"),
    ("accumulation: defer", "accumulation", "allowed: reduce_each, defer_all, defer_replicate"),
    ("loss_head: chunk", "loss_head", "did you mean 'chunked'?"),
    ("use_liger_kernel: 'true'", "use_liger_kernel", "must be true or false"),
    ("compile: inductor", "compile", "must be true or false"),
    ("mixed_precision: {storage_dtype: fp16}", "mixed_precision.storage_dtype", "allowed: fp32, bf16"),
    ("optimizer: adamw_bnb_8bit", "optimizer", "does not know sharded parameters (DTensor); write adamw_8bit"),
    ("optim: paged_adamw_8bit", "optim", "offload: optimizer"),
    ("optim: paged_adamw_32bit", "optim", "pages its states"),
    ("optimizer: adafactor", "optimizer", "is not built yet"),
    ("optimizer: 3", "optimizer", "allowed: adamw, adamw_8bit, sgd"),
    ("optimizer_implementation: capturable", "optimizer_implementation", "allowed: fused, foreach, for_loop"),
    ("optimizer_state_dtype: fp8", "optimizer_state_dtype", "is not built yet"),
    ("optimizer: sgd\nmomentum: 1", "momentum", "a number of 0 or more and below 1"),
    # contradictions
    ("fsdp: {strategy: FULL_SHARD, reshard_after_forward: false}", "fsdp.reshard_after_forward",
     "contradicts fsdp.strategy: FULL_SHARD; remove it, or set the strategy to SHARD_GRAD_OP"),
    ("fsdp: {strategy: hsdp, reshard_after_forward: false}", "fsdp.reshard_after_forward",
     "contradicts fsdp.strategy: hsdp; remove it, or set the strategy to HYBRID_SHARD_ZERO2"),
    ("fsdp: {strategy: zero2, reshard_after_forward: true}", "fsdp.reshard_after_forward", "to FULL_SHARD"),
    ("fsdp: {strategy: zero2, reshard_after_forward: 2}", "fsdp.reshard_after_forward", "to FULL_SHARD"),
    ("fsdp: {strategy: HYBRID_SHARD_ZERO2, reshard_after_forward: 2}", "fsdp.reshard_after_forward", "to HYBRID_SHARD"),
    ("fsdp: {strategy: no_shard, reshard_after_forward: false}", "fsdp.reshard_after_forward", "gathers nothing"),
    ("fsdp: {strategy: no_shard, reshard_after_forward: 2}", "fsdp.reshard_after_forward", "contradicts"),
    ("fsdp: ddp\nmesh: {shard: 2}", "mesh.shard", "contradicts fsdp: ddp, which shards nothing"),
    ("fsdp: full_shard\nmesh: {replicate: 2}", "mesh.replicate", "contradicts fsdp: full_shard, which has no replicas"),
    ("fsdp: {strategy: zero2, mesh: {replicate: 2}}", "fsdp.mesh.replicate", "set the strategy to HYBRID_SHARD_ZERO2"),
    ("mesh: {sequence_parallel: true}", "mesh.sequence_parallel", "needs mesh.tensor above 1"),
    ("mesh: {tensor: 1, sequence_parallel: true}", "mesh.sequence_parallel", "contradicts mesh.tensor: 1"),
    ("fsdp: full_shard\naccumulation: defer_replicate", "accumulation", "contradicts fsdp: full_shard"),
    ("fsdp: zero2\naccumulation: defer_replicate", "accumulation", "set the strategy to HYBRID_SHARD_ZERO2"),
    ("mesh: {replicate: 1}\naccumulation: defer_replicate", "accumulation", "contradicts mesh.replicate: 1"),
    ("loss_chunk: 64", "loss_chunk", "has no effect without loss_head: chunked"),
    ("loss_chunk: 64\nloss_head: eager", "loss_chunk", "contradicts loss_head: eager"),
    ("use_liger_kernel: true\nloss_chunk: 64", "loss_chunk", "contradicts use_liger_kernel: true"),
    ("use_liger_kernel: false\nloss_head: fused", "use_liger_kernel", "contradicts loss_head: fused"),
    ("use_liger_kernel: true\nloss_head: eager", "loss_head", "contradicts use_liger_kernel: true"),
    ("momentum: 0.9", "momentum", "has no effect without optimizer: sgd"),
    ("optim: adamw_torch\nmomentum: 0.9", "momentum", "contradicts optim: adamw_torch"),
    ("optimizer: sgd\noptimizer_state_dtype: bf16", "optimizer_state_dtype", "without momentum, which keeps no states"),
    ("optimizer: adamw_8bit\noptimizer_state_dtype: bf16", "optimizer_state_dtype", "its states have 8 bits"),
    ("optimizer: adamw_8bit\noptimizer_implementation: fused", "optimizer_implementation", "has its own"),
    ("optimizer: adamw_8bit\noffload: optimizer", "offload", "whose states stay on the device"),
    ("optim: adamw_torch_fused\noptimizer_implementation: foreach", "optimizer_implementation",
     "contradicts optim: adamw_torch_fused"),
    ("offload: {parameters: true, optimizer: false}", "offload.optimizer", "contradicts offload.parameters: true"),
    ("fsdp: {cpu_offload: true}\noffload: {optimizer: false}", "offload.optimizer", "fsdp.cpu_offload: true"),
    ("fsdp: full_shard offload\noffload: none", "offload", "contradicts fsdp: full_shard offload"),
    ("fsdp: {mesh: {tensor: 2}}\nmesh: {tensor: 4}", "mesh.tensor", "contradicts fsdp.mesh.tensor: 2"),
    ("fsdp: {prefetch: 2}\nprefetch: {forward: 1}", "prefetch.forward", "contradicts fsdp.prefetch: 2"),
    ("fsdp: full_shard backward_pre\nprefetch: {backward: 0}", "prefetch.backward",
     "contradicts fsdp: full_shard backward_pre"),
    ("fsdp: {units: Linear}\nunits: {wrap: Conv1D}", "units.wrap", "contradicts fsdp.units: Linear"),
    ("fsdp: {compile: true}\ntorch_compile: false", "torch_compile", "contradicts fsdp.compile: true"),
    ("fsdp: {loss_head: chunked}\nloss_head: eager", "loss_head", "contradicts fsdp.loss_head: chunked"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "field", "words"), BAD, ids=[text[:60] for text, _, _ in BAD])
def test_bad_input(text, field, words):
    (problem,) = problems_of(text)
    assert problem.field == field
    assert words in str(problem)
    assert problem.line is not None
    assert problem.line >= 3


def test_values_of_no_usable_type_meet_the_checks_of_contradictions():
    text = "fsdp: {strategy: [], reshard_after_forward: 2}\nmesh: {replicate: [], shard: 2}\naccumulation: {a: 1}"
    problems = problems_of(text + "\noptimizer: []\nmomentum: []\noffload: {parameters: []}\nloss_chunk: []")
    assert {"fsdp.strategy", "mesh.replicate", "accumulation", "optimizer"} <= {problem.field for problem in problems}


def test_a_contradiction_between_file_and_override_is_found():
    (problem,) = problems_of("offload: {parameters: true}", "offload.optimizer=false")
    assert problem.field == "offload.optimizer"
    (problem,) = problems_of("accumulation: defer_replicate", "fsdp=zero3")
    assert "contradicts fsdp: zero3" in str(problem)
