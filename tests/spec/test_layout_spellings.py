"""Every spelling of mesh, units, prefetch, offload, loss and optimizer gives the Job that it should."""

from __future__ import annotations

import pytest

from shardwise.spec.job import FsdpChoice, Job, PrecisionChoice
from shardwise.spec.keys import PLAN_KEYS
from shardwise.spec.layout import MeshChoice, Offload, PrefetchChoice, ReduceScatterChoice, Units
from shardwise.spec.plan import Plan
from shardwise.spec.reader import job_to_yaml, read_job
from shardwise.spec.wording import FIELDS, SECTIONS

NEEDED = "model: m\ndata: d.jsonl\n"
HYBRID = FsdpChoice(strategy="HYBRID_SHARD")
HYBRID_2 = FsdpChoice(strategy="HYBRID_SHARD_ZERO2")
LLAMA = Units(wrap=("LlamaDecoderLayer",))
BOTH = Units(wrap=("LlamaDecoderLayer", "Linear"))
PARAMETERS = Offload(optimizer=True, parameters=True)
BACKWARD = PrefetchChoice(backward=1)


def job_of(text: str, *overrides: str) -> Job:
    return read_job(None, overrides, text=NEEDED + text)


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        # strategies
        ("fsdp: hybrid_shard auto_wrap", "fsdp", HYBRID),
        ("fsdp: [HYBRID_SHARD]", "fsdp", HYBRID),
        ("fsdp: HSDP", "fsdp", HYBRID),
        ("fsdp: hybrid_shard_zero2", "fsdp", HYBRID_2),
        ("fsdp: ShardingStrategy._HYBRID_SHARD_ZERO2", "fsdp", HYBRID_2),
        ("fsdp: {strategy: _hybrid_shard_zero2}", "fsdp", HYBRID_2),
        ("fsdp: {reshard_after_forward: 2}", "fsdp", FsdpChoice(reshard_after_forward=2)),
        ("fsdp: {strategy: hsdp, reshard_after_forward: 4}", "fsdp",
         FsdpChoice(strategy="HYBRID_SHARD", reshard_after_forward=4)),
        # mesh and units
        ("mesh: {replicate: 2, shard: 4, tensor: 2, sequence_parallel: true}", "mesh",
         MeshChoice(replicate=2, shard=4, tensor=2, sequence_parallel=True)),
        ("fsdp: {strategy: hsdp, mesh: {shard: 4}}", "mesh", MeshChoice(shard=4)),
        ("fsdp: {strategy: hsdp, mesh: {shard: 4}}\nmesh: {replicate: 2}", "mesh", MeshChoice(replicate=2, shard=4)),
        ("train: {fsdp: {mesh: {tensor: 2}}}", "mesh", MeshChoice(tensor=2)),
        ("units: {embedding: own, head: own}", "units", Units(embedding="own", head="own")),
        ("units: {wrap: [LlamaDecoderLayer]}", "units", LLAMA),
        ("units: {wrap: []}", "units", Units()),
        ("units: {wrap: 'LlamaDecoderLayer,Linear'}", "units", BOTH),
        ("units: [LlamaDecoderLayer, Linear]", "units", BOTH),
        ("units: LlamaDecoderLayer", "units", LLAMA),
        ("fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer, Linear", "units", BOTH),
        ("fsdp: {transformer_layer_cls_to_wrap: [LlamaDecoderLayer]}", "units", LLAMA),
        ("fsdp: {units: [LlamaDecoderLayer]}", "units", LLAMA),
        ("fsdp: {units: {wrap: LlamaDecoderLayer}}\nunits: {head: own}", "units",
         Units(wrap=("LlamaDecoderLayer",), head="own")),
        ("fsdp_transformer_layer_cls_to_wrap: Linear\nunits: {wrap: [Linear]}", "units", Units(wrap=("Linear",))),
        # prefetch and reductions
        ("prefetch: 2", "prefetch", PrefetchChoice(forward=2, backward=2)),
        ("prefetch: 0", "prefetch", PrefetchChoice(forward=0, backward=0)),
        ("prefetch: false", "prefetch", PrefetchChoice(forward=0, backward=0)),
        ("prefetch: {forward: 1, async_all_gather: false}", "prefetch",
         PrefetchChoice(forward=1, async_all_gather=False)),
        ("fsdp: {prefetch: 3}", "prefetch", PrefetchChoice(forward=3, backward=3)),
        ("fsdp: {backward_prefetch: BACKWARD_PRE}", "prefetch", BACKWARD),
        ("fsdp: {backward_prefetch: BackwardPrefetch.BACKWARD_PRE, forward_prefetch: false}", "prefetch",
         PrefetchChoice(forward=0, backward=1)),
        ("fsdp: {backward_prefetch: NO_PREFETCH}", "prefetch", PrefetchChoice(backward=0)),
        ("fsdp: {backward_prefetch: none}", "prefetch", PrefetchChoice(backward=0)),
        ("fsdp: {backward_prefetch: 2}", "prefetch", PrefetchChoice(backward=2)),
        ("fsdp: {forward_prefetch: true}", "prefetch", PrefetchChoice(forward=1)),
        ("backward_prefetch: backward_pre", "prefetch", BACKWARD),
        ("fsdp: [full_shard, backward_prefetch]", "prefetch", BACKWARD),
        ("fsdp: full_shard backward_pre forward_prefetch", "prefetch", PrefetchChoice(forward=1, backward=1)),
        ("fsdp: full_shard no_prefetch", "prefetch", PrefetchChoice(backward=0)),
        ("fsdp: full_shard prefetch", "prefetch", PrefetchChoice(forward=1, backward=1)),
        ("fsdp: full_shard backward_pre\nprefetch: {backward: 1}", "prefetch", BACKWARD),
        ("reduce_scatter: {buffers: 3, separate_group: true, asynchronous: false}", "reduce_scatter",
         ReduceScatterChoice(buffers=3, separate_group=True, asynchronous=False)),
        ("fsdp: {reduce_scatter: {buffers: 3}}", "reduce_scatter", ReduceScatterChoice(buffers=3)),
        # offload
        ("offload: none", "offload", Offload()),
        ("offload: false", "offload", Offload()),
        ("offload: optimizer", "offload", Offload(optimizer=True)),
        ("offload: params", "offload", PARAMETERS),
        ("offload: parameters", "offload", PARAMETERS),
        ("offload: [Activations, optimizer]", "offload", Offload(optimizer=True, activations=True)),
        ("offload: parameters, activations", "offload", Offload(optimizer=True, parameters=True, activations=True)),
        ("offload: {parameters: true}", "offload", PARAMETERS),
        ("offload: {params: true}", "offload", PARAMETERS),
        ("offload: {activations: true}", "offload", Offload(activations=True)),
        ("fsdp: full_shard offload", "offload", PARAMETERS),
        ("fsdp: [cpu_offload]", "offload", PARAMETERS),
        ("fsdp: {offload_params: true}", "offload", PARAMETERS),
        ("fsdp: {cpu_offload: true}", "offload", PARAMETERS),
        ("fsdp: {cpu_offload: false}", "offload", Offload()),
        ("fsdp: {offload: optimizer}", "offload", Offload(optimizer=True)),
        ("fsdp: {cpu_offload: false}\noffload: optimizer", "offload", Offload(optimizer=True)),
        ("fsdp: full_shard offload\noffload: parameters", "offload", PARAMETERS),
        # accumulation, loss, compile, checkpointing
        ("accumulation: defer_all", "accumulation", "defer_all"),
        ("accumulation: no_sync", "accumulation", "defer_all"),
        ("fsdp: {strategy: hsdp, accumulation: defer_replicate}", "accumulation", "defer_replicate"),
        ("fsdp: {accumulation_mode: defer_all}", "accumulation", "defer_all"),
        ("loss_head: chunked\nloss_chunk: 64", "loss_chunk", 64),
        ("loss_head: liger", "loss_head", "fused"),
        ("use_liger_kernel: true", "loss_head", "fused"),
        ("use_liger_kernel: true\nloss_head: fused", "loss_head", "fused"),
        ("use_liger_kernel: false", "loss_head", "eager"),
        ("use_liger_kernel: false\nloss_head: chunked", "loss_head", "chunked"),
        ("fsdp: {loss_head: chunked}", "loss_head", "chunked"),
        ("compile: true", "compile", True),
        ("torch_compile: true", "compile", True),
        ("fsdp: {compile: true}", "compile", True),
        ("activation_checkpointing: selective", "activation_checkpointing", "selective"),
        ("fsdp: {activation_checkpointing: true}", "activation_checkpointing", "full"),
        ("fsdp: {mixed_precision: bf16}", "mixed_precision", PrecisionChoice(param_dtype="bf16")),
        ("mixed_precision: {param_dtype: bf16, storage_dtype: bfloat16}", "mixed_precision",
         PrecisionChoice(param_dtype="bf16", storage_dtype="bf16")),
        ("mixed_precision: fp16\nmixed_precision.storage_dtype: bf16", "mixed_precision",
         PrecisionChoice(param_dtype="fp16", storage_dtype="bf16")),
        ("fsdp: {micro_batch: 2}", "micro_batch", 2),
        # optimizer
        ("optimizer: SGD", "optimizer", "sgd"),
        ("optimizer: AdamW", "optimizer", "adamw"),
        ("optim: adamw_torch_8bit", "optimizer", "adamw_8bit"),
        ("optim: adamw_torch_fused", "optimizer", "adamw"),
        ("optim: adamw_torch_fused", "optimizer_implementation", "fused"),
        ("optim: adamw_torch_fused\noptimizer: adamw", "optimizer_implementation", "fused"),
        ("optim: adamw_torch_fused\noptimizer_implementation: fused", "optimizer_implementation", "fused"),
        ("optimizer_implementation: for-loop", "optimizer_implementation", "for_loop"),
        ("fp16: true\noptimizer_implementation: fused", "optimizer_implementation", "fused"),
        ("optimizer_state_dtype: torch.bfloat16", "optimizer_state_dtype", "bf16"),
        ("optimizer: sgd\nmomentum: 0.9\noptimizer_state_dtype: bf16", "optimizer_state_dtype", "bf16"),
        ("momentum: 0", "momentum", 0.0),
        ("self_checks: false", "self_checks", False),
    ],
)  # fmt: skip
def test_spellings(text, field, value):
    job = job_of(text)
    assert getattr(job, field) == value
    assert read_job(None, text=job_to_yaml(job)) == job


@pytest.mark.parametrize(
    ("text", "override", "field", "value"),
    [
        ("fsdp: full_shard offload", "offload=none", "offload", Offload()),
        ("fsdp: full_shard offload", "fsdp=full_shard", "offload", Offload()),
        ("fsdp: {strategy: hsdp, mesh: {shard: 4}, prefetch: 2}", "fsdp=full_shard", "mesh", MeshChoice()),
        ("train: {fsdp: {mesh: {tensor: 2}}}", "fsdp=full_shard", "mesh", MeshChoice()),
        ("fsdp: {mesh: {tensor: 2}}", "mesh.tensor=4", "mesh", MeshChoice(tensor=4)),
        ("mesh: {tensor: 2}", "fsdp.mesh.tensor=4", "mesh", MeshChoice(tensor=4)),
        ("mesh: {tensor: 2}", "mesh={shard: 2}", "mesh", MeshChoice(shard=2)),
        ("mesh: {tensor: 2}", "mesh=null", "mesh", MeshChoice()),
        ("fsdp: full_shard backward_pre", "prefetch=0", "prefetch", PrefetchChoice(forward=0, backward=0)),
        ("prefetch: 2", "prefetch.forward=0", "prefetch", PrefetchChoice(forward=0, backward=2)),
        ("offload: {parameters: true}", "offload.parameters=false", "offload", Offload()),
        ("offload: none", "offload.parameters=true", "offload", PARAMETERS),
        ("optim: adamw_torch_fused", "optimizer=sgd", "optimizer_implementation", None),
        ("optim: adamw_torch_fused", "optimizer_implementation=foreach", "optimizer_implementation", "foreach"),
        ("units: [Linear]", "fsdp_transformer_layer_cls_to_wrap=LlamaDecoderLayer", "units", LLAMA),
    ],
)
def test_overrides(text, override, field, value):
    assert getattr(job_of(text, override), field) == value


def test_every_field_of_a_plan_can_stand_under_fsdp():
    renamed = {"attention": "model.attention", "accumulation_mode": "accumulation", "dtypes": "mixed_precision"}
    derived = {"accumulation_steps", "reasons"}
    own = {"strategy", "reshard_after_forward"}
    keys = {renamed.get(name, name) for name in Plan.model_fields} - derived - own
    assert keys <= set(PLAN_KEYS)
    assert set(PLAN_KEYS) - keys == {"optimizer_state_dtype"}
    assert set(PLAN_KEYS) <= {*FIELDS, *SECTIONS}


def test_what_has_no_effect_is_left_out_of_canonical_yaml():
    text = job_to_yaml(job_of(""))
    assert "momentum" not in text
    assert "loss_chunk" not in text
    assert "prefetch" not in text
    assert "loss_chunk: 1024" in job_to_yaml(job_of("loss_head: chunked"))
    assert "momentum: 0.0" in job_to_yaml(job_of("optimizer: sgd"))
