"""Units by formula are those of the real model with its adapters, row by row, and are refused for the same reasons."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import time

import pytest

from catalogue.shapes import BASE, FEW, GPT, LATENT, config
from shardwise.catalogue.models import find_model, model_from_config
from shardwise.engine.load import skeleton_of
from shardwise.engine.model_spec import config_of
from shardwise.engine.tp_check import check_tensor_parallel
from shardwise.engine.unit_table import unit_table as real_unit_table
from shardwise.predict.remembered import Remembered
from shardwise.predict.unit_rows import unit_kinds, unit_table
from shardwise.spec.method import Lora
from shardwise.spec.plan import Plan
from shardwise.spec.problems import BadInput
from shardwise.spec.workload import Workload

LLAMA = config("llama", BASE, num_hidden_layers=5)
FAMILIES = [
    LLAMA,
    config("llama", BASE, tie_word_embeddings=True),
    config("qwen2", BASE),
    config("qwen3", BASE, head_dim=20),
    config("gpt2", GPT),
    config("gemma2", BASE, head_dim=16),
    config("phi3", BASE, pad_token_id=1),
    config("phi", BASE),
    config("mixtral", BASE, num_local_experts=3),
    config("qwen3_moe", BASE, moe_intermediate_size=40, num_experts=5, mlp_only_layers=[1]),
    config("qwen2_moe", BASE, moe_intermediate_size=40, num_experts=5, shared_expert_intermediate_size=56),
    config("deepseek_v3", LATENT, q_lora_rank=20),
    config("gpt_neox", BASE, "num_key_value_heads"),
    config("opt", FEW, ffn_dim=96, word_embed_proj_dim=40),
    config("falcon", FEW),
    config("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 3, "vocab_size": 102}),
    config("gpt_bigcode", GPT),
    config("olmo2", BASE),
]
LORA = Lora(rank=3)
BOTH = {"embedding": "own", "head": "own"}


def plan(**fields: object) -> Plan:
    """A Plan; fields of mesh and dtypes are given flat."""
    mesh = {axis: fields.pop(axis) for axis in ("shard", "replicate", "tensor", "sequence_parallel") if axis in fields}
    dtypes = {
        "frozen_storage": fields.pop("frozen", "fp16"),
        "trained_storage": fields.pop("trained", "fp32"),
        "param": fields.pop("param", "bf16"),
        "reduce": fields.pop("reduce", "fp32"),
        "output": "fp32",
        "buffer": None,
        "loss_scaling": False,
    }
    given = {
        "strategy": "FULL_SHARD",
        "reshard_after_forward": True,
        "prefetch": {"forward": 0, "backward": 1, "async_all_gather": True},
        "reduce_scatter": {"buffers": 1, "separate_group": False, "asynchronous": False},
        "activation_checkpointing": "none",
        "attention": "sdpa",
        "micro_batch": 1,
        "accumulation_steps": 1,
        "mesh": {"shard": 3, **mesh},
        "dtypes": dtypes,
        **fields,
    }
    return Plan.model_validate(given)


LAYOUTS = [
    plan(),
    plan(strategy="NO_SHARD", shard=1, replicate=4, reshard_after_forward=False),
    plan(strategy="HYBRID_SHARD", shard=2, replicate=2, activation_checkpointing="every_2"),
    plan(strategy="SHARD_GRAD_OP", shard=7, activation_checkpointing="full", units=BOTH, reshard_after_forward=False),
    plan(shard=4, reshard_after_forward=2, activation_checkpointing="selective", units={"head": "own"}),
    plan(units={"embedding": "own"}, param="fp16", reduce="fp16", trained="bf16", activation_checkpointing="every_3"),
    plan(param="fp32", frozen="bf16"),
]


def real(fields, lora, asked):
    """The engine's table of the real model."""
    frozen = None if lora is None else asked.dtypes.frozen_storage
    spec = model_from_config(fields, name="real")
    skeleton = skeleton_of(
        config_of(spec),
        attention=None,
        frozen=frozen,
        trained=asked.dtypes.trained_storage,
        lora=lora,
        tensor=asked.mesh.tensor,
    )
    check_tensor_parallel(skeleton.model, asked.mesh)
    return real_unit_table(skeleton.model, asked)


def by_formula(fields, lora, asked):
    return unit_table(Workload(model=model_from_config(fields, name="formula"), seq_len=16, lora=lora), asked)


def assert_equal(fields, lora, asked):
    expected, found = real(fields, lora, asked), by_formula(fields, lora, asked)
    for one, other in zip(expected.rows, found.rows, strict=True):
        assert one == other
    assert expected == found


@pytest.mark.parametrize("lora", [None, LORA, Lora(rank=5, targets=("q_proj", "v_proj"))], ids=["full", "all", "named"])
@pytest.mark.parametrize("asked", LAYOUTS, ids=lambda asked: f"{asked.strategy}-{asked.mesh.shard}")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_layouts(asked, lora, tied):
    assert_equal({**LLAMA, "tie_word_embeddings": tied}, lora, asked)


@pytest.mark.parametrize("fields", FAMILIES, ids=lambda fields: fields["model_type"])
def test_families(fields):
    assert_equal(fields, None, LAYOUTS[3])
    try:
        expected = real(fields, LORA, LAYOUTS[2])
    except BadInput:  # falcon: its linear layers are a class of their own
        with pytest.raises(BadInput):
            by_formula(fields, LORA, LAYOUTS[2])
    else:
        if fields["model_type"] in ("deepseek_v3", "qwen3_moe"):
            with pytest.raises(BadInput, match="into adapters on fused experts"):
                by_formula(fields, LORA, LAYOUTS[2])
            assert_equal(fields, Lora(rank=3, targets=("o_proj",)), LAYOUTS[2])
        else:
            assert by_formula(fields, LORA, LAYOUTS[2]) == expected


@pytest.mark.parametrize(
    "lora",
    [
        Lora(rank=3, targets=("lm_head",)),
        Lora(rank=3, targets=("o_proj", "down_proj")),
        Lora(rank=3, targets=("layers.1.self_attn.q_proj", "layers.3.mlp.up_proj")),
        Lora(rank=3, modules_to_save=("lm_head",)),
        Lora(rank=3, modules_to_save=("embed_tokens", "lm_head")),
        Lora(rank=3, modules_to_save=("norm",)),
        Lora(rank=3, modules_to_save=("mlp",)),
        Lora(rank=3, modules_to_save=("layers.2.mlp",)),
        Lora(rank=3, modules_to_save=("input_layernorm", "norm"), targets=("q_proj",)),
    ],
    ids=lambda lora: f"{lora.targets}-{lora.modules_to_save}",
)
def test_adapters_and_modules_trained_whole(lora):
    assert_equal(LLAMA, lora, plan(units=BOTH, activation_checkpointing="every_2"))


@pytest.mark.parametrize(
    "wrap",
    [
        ("LlamaDecoderLayer",),
        ("LlamaAttention", "LlamaMLP"),
        ("LlamaMLP",),
        ("LlamaDecoderLayer", "LlamaMLP"),
        ("LlamaRMSNorm",),
        ("Linear",),
    ],
    ids="+".join,
)
@pytest.mark.parametrize("lora", [None, Lora(rank=3, targets=("down_proj",))], ids=["full", "lora"])
def test_units_by_class_name(wrap, lora):
    units = {"wrap": wrap, "embedding": "own"}
    assert_equal(LLAMA, lora, plan(units=units, activation_checkpointing="every_2", shard=2))


SPLIT = [
    LLAMA,
    *(f for f in FAMILIES if f["model_type"] in ("qwen3", "gemma2", "phi3", "phi", "gpt_neox", "olmo2", "opt")),
]


@pytest.mark.parametrize("fields", SPLIT, ids=lambda fields: fields["model_type"])
def test_a_tensor_axis(fields):
    assert_equal(fields, None, plan(tensor=2, shard=3))
    assert_equal(fields, LORA, plan(tensor=2, shard=2, replicate=2))


def test_a_tensor_axis_with_a_vocabulary_that_it_does_not_divide_and_sequence_parallelism():
    odd = {**LLAMA, "vocab_size": 103}
    assert_equal(odd, None, plan(tensor=2, sequence_parallel=True))
    assert_equal({**odd, "tie_word_embeddings": True}, LORA, plan(tensor=2, sequence_parallel=True))


REFUSED = [
    (LLAMA, Lora(targets=("q_prj",)), plan()),
    (LLAMA, Lora(modules_to_save=("layers",)), plan()),
    (LLAMA, Lora(modules_to_save=("layers.1",)), plan()),
    (LLAMA, Lora(modules_to_save=("model",)), plan()),
    (LLAMA, Lora(modules_to_save=("nrm",)), plan()),
    (LLAMA, Lora(modules_to_save=("self_attn",), targets=("q_proj",)), plan()),
    (LLAMA, Lora(modules_to_save=("mlp", "up_proj")), plan()),
    ({**LLAMA, "tie_word_embeddings": True}, Lora(modules_to_save=("lm_head",)), plan()),
    (LLAMA, Lora(modules_to_save=("norm",)), plan(tensor=2)),
    (LLAMA, None, plan(units={"wrap": ("LlamaModel",)})),
    (LLAMA, None, plan(units={"wrap": ("LlamaMLp",)})),
    (LLAMA, None, plan(tensor=4)),
    (FAMILIES[4], None, plan(tensor=2)),
    (config("mixtral", BASE), None, plan(tensor=2)),
    (config("falcon", FEW), None, plan(tensor=2)),
    (config("deepseek_v2", LATENT), None, plan(tensor=2)),
    (config("opt", FEW, ffn_dim=96), None, plan(tensor=2, sequence_parallel=True)),
    (config("gpt2", GPT), Lora(targets=("c_atn",)), plan()),
]


@pytest.mark.parametrize(("fields", "lora", "asked"), REFUSED, ids=[str(place) for place in range(len(REFUSED))])
def test_refusals_are_the_engine_s(fields, lora, asked):
    with pytest.raises(BadInput) as expected:
        real(fields, lora, asked)
    with pytest.raises(BadInput) as found:
        by_formula(fields, lora, asked)
    for one, other in zip(expected.value.problems, found.value.problems, strict=True):
        assert (one.field, one.value, one.fix) == (other.field, other.value, other.fix)
        assert one.reason.replace(".0.", ".*.") == other.reason.replace(".0.", ".*.")


def test_kinds_are_the_rows():
    spec = model_from_config(config("gemma3_text", BASE, num_hidden_layers=8), name="gemma")
    workload = Workload(model=spec, seq_len=16, lora=LORA)
    asked = plan(shard=5, activation_checkpointing="every_2", units={"embedding": "own"})
    kinds, rows = unit_kinds(workload, asked), unit_table(workload, asked).rows
    assert sum(kind.count for kind in kinds) == len(rows)
    assert [(kind.block_kind, kind.row.checkpointed, kind.blocks) for kind in kinds] == [
        (None, False, ()),
        (0, True, (0, 2, 4, 6)),
        (0, False, (1, 3, 7)),
        (1, False, (5,)),
        (None, False, ()),
    ]
    for kind in kinds:
        same = [row for row in rows if row.block in kind.blocks] if kind.blocks else [kind.row]
        assert kind.row == same[0]
        assert all(row == kind.row.model_copy(update={"name": row.name, "block": row.block}) for row in same)


def test_what_a_rank_holds():
    """Of a unit of [5, 7] in bf16, frozen, and adapters of rank 3 in fp32, over 4 ranks: rows are padded to 8 and 4."""
    spec = model_from_config(config("llama", BASE), name="llama")
    block = unit_kinds(
        Workload(model=spec, seq_len=9, lora=Lora(rank=3, targets=("q_proj",))), plan(frozen="bf16", shard=5)
    )[0]
    tensors = {tensor.name: tensor for tensor in block.tensors}
    assert tensors["self_attn.q_proj.lora_A.default.weight"].rank_elements == 1 * 64
    assert tensors["self_attn.q_proj.lora_B.default.weight"].rank_elements == 13 * 3
    assert tensors["mlp.down_proj.weight"].rank_elements == 13 * 96
    assert (block.rank_trained_elements, block.rank_trained_bytes) == (64 + 39, 4 * (64 + 39))
    frozen = sum(tensor.rank_elements for tensor in block.tensors if not tensor.trained)
    assert block.rank_frozen_bytes == 2 * frozen
    assert block.trained_gathered_bytes == 2 * (3 * 64 + 64 * 3)
    assert block.row.all_gather_bytes == 2 * 5 * (frozen + 64 + 39)
    assert block.row.reduce_scatter_bytes == 4 * 5 * (64 + 39)


def test_frozen_weights_as_published():
    spec = find_model("gemma-2-2b")
    workload = Workload(model=spec, seq_len=9, lora=LORA)
    assert unit_kinds(workload, plan(frozen="checkpoint"))[0].row.stored_by_dtype.keys() == {"bfloat16", "float32"}
    unsaid = workload.model_copy(update={"model": model_from_config(LLAMA, name="mine")})
    with pytest.raises(BadInput, match="the configuration of mine does not say in which dtype"):
        unit_kinds(unsaid, plan(frozen="checkpoint"))


def test_values_are_remembered_per_object_and_forgotten_with_it():
    class Thing:
        """Something that cannot be a key."""

        __hash__ = None

    held: Remembered[int] = Remembered()
    one, other, made = Thing(), Thing(), []

    def make(value):
        made.append(value)
        return value

    assert [held.get(one, "a", lambda: make(1)), held.get(one, "a", lambda: make(2))] == [1, 1]
    assert held.get(other, "a", lambda: make(3)) == 3
    assert held.get(one, "b", lambda: make(4)) == 4
    del one
    gc.collect()
    assert held.get(Thing(), "a", lambda: make(5)) == 5
    assert made == [1, 3, 4, 5]


def test_a_search_pays_little_per_plan():
    """Plans that differ in nothing that sizes units cost a lookup; each other one well under a millisecond."""
    workload = Workload(model=find_model("llama-3.1-405b"), seq_len=4096, lora=Lora(rank=16))
    plans = [
        plan(frozen="bf16", shard=shard, activation_checkpointing=recomputed, reshard_after_forward=freed)
        for shard in range(2, 130)
        for recomputed in ("none", "full", "every_2")
        for freed in (True, False)
    ]
    random.Random(0).shuffle(plans)
    seconds = []
    for _ in range(2):
        begin = time.process_time()
        for asked in plans:
            unit_kinds(workload, asked)
        seconds.append((time.process_time() - begin) / len(plans))
    assert seconds[0] < 300e-6
    assert seconds[1] < 20e-6


BLOCKED = """
import sys
from shardwise.catalogue.models import find_model
import shardwise.predict.unit_rows
assert not {"torch", "transformers", "peft"} & set(sys.modules)
"""


def test_it_needs_no_torch():
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
