"""Training with a tensor axis equals one process on the whole global batch."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor.placement_types import Replicate, Shard

from engine.training import GLOBAL_BATCH, full, make_job, make_plan, one_process_model, train_on_rank, whole_batch
from harness.ranks import run_ranks
from shardwise.engine.compat import strided_shard
from shardwise.engine.load import build_skeleton, load_model
from shardwise.engine.mesh import build_mesh, data_rank
from shardwise.engine.names import base_name, unwrapped_name
from shardwise.engine.source import open_source
from shardwise.engine.tensor_parallel import planned_placements
from shardwise.spec.layout import Mesh

TENSOR_2 = {"tensor": 2}
SEQUENCE_2 = {"tensor": 2, "sequence_parallel": True}
SHARD_TENSOR = {"shard": 2, "tensor": 2}
SHARD_SEQUENCE = {"shard": 2, "tensor": 2, "sequence_parallel": True}
REPLICATE_TENSOR = {"replicate": 2, "tensor": 2}

GROUPED = {"heads": 4, "kv": 2, "head_dim": 16}


def _job(folder, mesh, **fields):
    world = mesh.get("replicate", 1) * mesh.get("shard", 1) * mesh["tensor"]
    strategy = "FULL_SHARD" if "shard" in mesh else "NO_SHARD"
    job = make_job(folder, mesh=mesh, fsdp={"strategy": strategy}, micro_batch=3, **fields)
    return job, world


def _whole(job):
    """The same training without layout: one reference serves every mesh."""
    plain = {
        "fsdp": type(job.fsdp)(),
        "mesh": type(job.mesh)(),
        "micro_batch": GLOBAL_BATCH,
        "activation_checkpointing": "none",
        "accumulation": "reduce_each",
    }
    return whole_batch(job.model_copy(update=plain).model_dump_json())


def _error(given, wanted, scale):
    """Relative to the tensor, or to the whole gradient where the tensor's own is rounding (biases of keys)."""
    return float((given - wanted).norm() / max(float(wanted.norm()), 1e-3 * scale))


def _assert_equal(job, world, tolerance=4e-6, weights=4e-6):
    """Bounds after three steps: 1e-6 for the order of sums, grown by two updates that AdamW scales up."""
    wanted = _whole(job)
    for live in run_ranks(train_on_rank, world, job):
        assert live.losses == pytest.approx(wanted.losses, rel=tolerance)
        assert live.norms == pytest.approx(wanted.norms, rel=tolerance)
        assert live.gradients.keys() == wanted.gradients.keys()
        scale = wanted.norms[-1]
        errors = {name: _error(given, wanted.gradients[name], scale) for name, given in live.gradients.items()}
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] < tolerance, f"gradient of {worst} is off by {errors[worst]:.1e}"
        assert live.weights.keys() == wanted.weights.keys()
        for name, weight in live.weights.items():
            if not name.endswith("k_proj.bias"):  # their gradients are rounding, which AdamW scales up
                torch.testing.assert_close(weight, wanted.weights[name], atol=weights, rtol=0, msg=name)


CASES = {
    "2": ("llama", TENSOR_2, {"kv": 2}),
    "2-tied": ("llama", TENSOR_2, {"kv": 2, "vocab": 102, "tied": True}),
    "2-tied-odd-vocabulary": ("llama", TENSOR_2, {"kv": 2, "tied": True}),
    "2x2": ("llama", SHARD_TENSOR, {"vocab": 102, **GROUPED}),
    "2x2-qkv-biases": ("qwen2", SHARD_TENSOR, {"kv": 2, "tied": True}),
    "copies-x-2": ("qwen2", REPLICATE_TENSOR, {"kv": 2}),
    "2-sequence-tied": ("llama", SEQUENCE_2, {"kv": 2, "vocab": 102, "tied": True, "mlp_bias": True}),
    "2x2-sequence": ("qwen2", SHARD_SEQUENCE, {"vocab": 102, **GROUPED}),
    "4-sequence": (
        "llama",
        {"tensor": 4, "sequence_parallel": True},
        {"heads": 4, "kv": 4, "head_dim": 16, "vocab": 104},
    ),
}


SLOW = ("copies-x-2", "4-sequence")


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in CASES])
def test_full_training_equals_one_process(tiny, case):
    """Rows of 5 to 23 tokens: padded on the right, with masks, and of lengths that 2 and 4 do not divide."""
    family, mesh, options = CASES[case]
    job, world = _job(tiny(family, layers=2, **options), mesh)
    _assert_equal(job, world)
    assert max(_whole(job).norms) > job.max_grad_norm, "clipping was never active"


@pytest.mark.parametrize("mesh", [SHARD_TENSOR, SEQUENCE_2], ids=str)
def test_lora_equals_one_process(tiny, mesh):
    folder = tiny("qwen2", layers=2, kv=2, vocab=102, tied=True)
    _assert_equal(*_job(folder, mesh, use_lora=True, activation_checkpointing="every_2"))


def test_lora_on_the_head_equals_one_process(tiny):
    targets = ["q_proj", "down_proj", "lm_head"]
    folder = tiny("llama", layers=2, kv=2, vocab=102)
    _assert_equal(*_job(folder, TENSOR_2, use_lora=True, lora_targets=targets))


def test_recomputed_and_deferred_steps_equal_one_process(tiny):
    folder = tiny("llama", layers=2, kv=2)
    _assert_equal(*_job(folder, SEQUENCE_2, activation_checkpointing="full", accumulation="defer_all"))


@pytest.mark.slow
def test_bf16_stays_near_one_process(tiny):
    """bf16 keeps 8 bits, and sums over ranks round once more."""
    job, world = _job(tiny("llama", layers=2, kv=2, vocab=102), SHARD_SEQUENCE, mixed_precision={"param_dtype": "bf16"})
    wanted = _whole(job)
    for live in run_ranks(train_on_rank, world, job):
        assert live.losses == pytest.approx(wanted.losses, rel=1e-2)
        assert live.norms == pytest.approx(wanted.norms, rel=3e-2)


FAMILIES = {
    "qwen3": (SEQUENCE_2, True, {"kv": 2}),  # norms on heads
    "gemma3_text": (TENSOR_2, False, {"kv": 2}),  # norms after attention and MLP, scaled embedding
    "phi3": (TENSOR_2, True, {"kv": 2, "pad_token_id": 1}),  # fused projections, joined before they are cut up
    "olmo2": (SEQUENCE_2, False, {"kv": 2}),  # norms over all heads
    "gpt_neox": (SEQUENCE_2, False, {}),  # fused projection that splits by heads, biases on rows
    "stablelm": (SEQUENCE_2, True, {"kv": 2}),  # no plan in transformers
    "opt": (TENSOR_2, True, {"dropout": 0.0, "ffn_dim": 96, "word_embed_proj_dim": 64}),  # no plan, MLP in the block
    "bloom": (TENSOR_2, False, {"hidden_dropout": 0.0, "attention_dropout": 0.0, "n_head": 2}),  # no plan, fused
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_plan_equals_one_process(tiny, family):
    mesh, lora, options = FAMILIES[family]
    plain = {"optimizer": "sgd", "learning_rate": 0.1}  # AdamW would scale rounding up where gradients are near zero
    job, world = _job(tiny(family, layers=2, vocab=102, **options), mesh, use_lora=lora, **plain)
    _assert_equal(job, world, tolerance=1e-5)


def _loaded(rank, world, job):
    plan = make_plan(job, world)
    model = load_model(job, plan, open_source(job.model), build_mesh(plan.mesh, "cpu"))
    return {base_name(name): full(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("mesh", [SHARD_TENSOR, REPLICATE_TENSOR], ids=str)
def test_every_rank_reads_its_slices_and_adapters_start_the_same(tiny, mesh):
    """102 rows of vocabulary over 2 x 2 ranks, adapters of 3 rows over 2: parts of unequal size."""
    job, world = _job(tiny("qwen2", layers=2, vocab=102, **GROUPED), mesh, use_lora=True)
    wanted = {base_name(name): parameter for name, parameter in one_process_model(job).named_parameters()}
    for live in run_ranks(_loaded, world, job):
        assert live.keys() == wanted.keys()
        for name, weight in live.items():
            assert torch.equal(weight, wanted[name]), name


def _live_placements(rank, world, job):
    plan = make_plan(job, world)
    model = load_model(job, plan, open_source(job.model), build_mesh(plan.mesh, "cpu"))
    live = {unwrapped_name(n): tuple(map(str, p.placements)) for n, p in model.named_parameters()}
    trained = {unwrapped_name(n) for n, p in model.named_parameters() if p.requires_grad}
    return live, trained


def _skeleton(job):
    source = open_source(job.model)
    return build_skeleton(job, source.config, source.dtype, source).model


@pytest.mark.parametrize("mesh", [SHARD_SEQUENCE, REPLICATE_TENSOR], ids=str)
def test_live_placements_are_the_planned_ones(tiny, mesh):
    folder = tiny("qwen3", layers=2, kv=2, vocab=102)
    job, world = _job(folder, mesh, use_lora=True, activation_checkpointing="full", lora_targets=["o_proj"])
    model = _skeleton(job)
    planned = {n: tuple(map(str, p)) for n, p in planned_placements(model, make_plan(job, world).mesh).items()}
    wanted = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for live, trained in run_ranks(_live_placements, world, job):
        assert live == planned
        assert trained == wanted, "a frozen norm on a part of the sequence must not start to train"


def test_planned_placements_spelled_out(tiny):
    job, _ = _job(tiny("qwen3", layers=2, kv=2, vocab=102), SHARD_SEQUENCE, use_lora=True, lora_targets=["o_proj"])
    planned = planned_placements(_skeleton(job), Mesh(shard=2, tensor=2, sequence_parallel=True))
    layer = "base_model.model.model.layers.1"
    attention = f"{layer}.self_attn"
    twice = strided_shard(0, 2)
    assert planned[f"{attention}.q_proj.weight"] == (twice, Shard(0))
    assert planned[f"{attention}.q_norm.weight"] == (Shard(0), Replicate())
    assert planned[f"{attention}.o_proj.base_layer.weight"] == (Shard(0), Shard(1))
    assert planned[f"{attention}.o_proj.lora_A.default.weight"] == (Shard(0), Shard(1))
    assert planned[f"{attention}.o_proj.lora_B.default.weight"] == (Shard(0), Replicate())
    assert planned[f"{layer}.input_layernorm.weight"] == (Shard(0), Replicate())
    assert planned["base_model.model.lm_head.weight"] == (twice, Shard(0))
    without = planned_placements(_skeleton(job), Mesh(replicate=2, tensor=2))
    assert without[f"{layer}.input_layernorm.weight"] == (Replicate(), Shard(0))
    assert without[f"{attention}.o_proj.lora_B.default.weight"] == (Replicate(), Shard(0))


def test_ranks_of_a_tensor_group_see_the_same_rows(tiny):
    job, world = _job(tiny("llama", layers=2, kv=2), SHARD_TENSOR)
    mesh = make_plan(job, world).mesh
    assert [data_rank(mesh, rank) for rank in range(world)] == [0, 0, 1, 1]
