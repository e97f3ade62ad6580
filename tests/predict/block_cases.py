"""Small models of every family, and what the formulas say of one step of theirs, part by part."""

from __future__ import annotations

from typing import Any

from shardwise.catalogue.families.registry import spec_by_formula
from shardwise.predict.blocks import Computation, PartMemory, computation, modes_of
from shardwise.spec.layout import Mesh, Prefetch, ReduceScatter, is_checkpointed
from shardwise.spec.method import Lora
from shardwise.spec.plan import Dtypes, Plan
from shardwise.spec.runtime import Runtime
from shardwise.spec.workload import Workload

ROWS, LENGTH, VOCAB = 3, 70, 331

SHARDWISE = Runtime()

_SIZES = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
_NO_HEAD_DIM: dict[str, Any] = {"head_dim": None}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    "head_dim": None,
    "num_key_value_heads": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 80,
    "n_shared_experts": 1,
    "kv_lora_rank": 48,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}
_GPT2 = {"model_type": "gpt2", "n_embd": 96, "n_head": 6, "n_layer": 3, "vocab_size": VOCAB, "n_positions": 128}
_FALCON = {"num_attention_heads": 6, "num_kv_heads": 2, "num_hidden_layers": 3, "vocab_size": VOCAB, "pad_token_id": 0}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def tiny(model_type: str, **changes: Any) -> dict[str, Any]:
    """Return a configuration with odd sizes; a field changed to None is left out."""
    given = {"model_type": model_type, **_SIZES, **changes}
    return {name: value for name, value in given.items() if value is not None or name == "q_lora_rank"}


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": tiny("llama"),
    "mistral, window": tiny("mistral", sliding_window=33),
    "qwen2": tiny("qwen2", **_NO_HEAD_DIM),
    "qwen3": tiny("qwen3"),
    "smollm3": tiny("smollm3", **_NO_HEAD_DIM),
    "granite": tiny("granite", residual_multiplier=0.5, logits_scaling=2.0, embedding_multiplier=3.0, **_NO_HEAD_DIM),
    "olmo2": tiny("olmo2", **_NO_HEAD_DIM),
    "starcoder2": tiny("starcoder2", **_NO_HEAD_DIM),
    "nemotron": tiny("nemotron"),
    "phi": tiny("phi", **_NO_HEAD_DIM),
    "phi3": tiny("phi3", **_NO_HEAD_DIM),
    "gemma": tiny("gemma", tie_word_embeddings=True),
    "gemma2": tiny("gemma2", query_pre_attn_scalar=16),
    "gemma3_text": tiny("gemma3_text", sliding_window=40, query_pre_attn_scalar=16),
    "gpt2": {**_GPT2, **_NO_DROPOUT},
    "gpt2, dropout": _GPT2,
    "gpt_neox": tiny("gpt_neox", num_key_value_heads=None, **_NO_HEAD_DIM),
    "opt": {
        "model_type": "opt",
        "hidden_size": 96,
        "num_attention_heads": 6,
        "ffn_dim": 200,
        "num_hidden_layers": 3,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "word_embed_proj_dim": 96,
        "dropout": 0.0,
    },
    "gpt_bigcode": {**_GPT2, **_NO_DROPOUT, "model_type": "gpt_bigcode"},
    "bloom": {"model_type": "bloom", "hidden_size": 96, "n_head": 6, "n_layer": 3, "vocab_size": VOCAB},
    "mpt": {
        "model_type": "mpt",
        "d_model": 96,
        "n_heads": 6,
        "n_layers": 3,
        "vocab_size": VOCAB,
        "max_seq_len": LENGTH,
    },
    "falcon": {"model_type": "falcon", "hidden_size": 96, **_FALCON},
    "falcon, new": {"model_type": "falcon", "hidden_size": 96, "new_decoder_architecture": True, **_FALCON},
    "mixtral": tiny("mixtral", num_local_experts=4, num_experts_per_tok=2, intermediate_size=80),
    "qwen3_moe": tiny("qwen3_moe", moe_intermediate_size=80, **_EXPERTS),
    "qwen2_moe": tiny(
        "qwen2_moe", moe_intermediate_size=80, shared_expert_intermediate_size=160, **_EXPERTS, **_NO_HEAD_DIM
    ),
    "olmoe": tiny("olmoe", intermediate_size=80, **_EXPERTS, **_NO_HEAD_DIM),
    "deepseek_v3": tiny("deepseek_v3", n_group=2, topk_group=1, q_lora_rank=32, **_LATENT),
    "deepseek_v2": tiny("deepseek_v2", q_lora_rank=None, **_LATENT),
}


def plan(**changes: Any) -> Plan:
    """Return a plan of one process; `param` and `output` are dtypes."""
    dtypes = Dtypes(
        frozen_storage=None,
        param=changes.pop("param", "bf16"),
        reduce="fp32",
        output=changes.pop("output", "fp32"),
        buffer=None,
        loss_scaling=False,
    )
    fields: dict[str, Any] = {
        "strategy": "NO_SHARD",
        "mesh": Mesh(),
        "reshard_after_forward": True,
        "prefetch": Prefetch(forward=0, backward=1, async_all_gather=False),
        "reduce_scatter": ReduceScatter(buffers=1, separate_group=False, asynchronous=False),
        "activation_checkpointing": "none",
        "attention": "sdpa",
        "micro_batch": ROWS,
        "accumulation_steps": 1,
    }
    return Plan(dtypes=dtypes, **{**fields, **changes})


def workload(config: dict[str, Any], lora: Lora | None = None, *, length: int = LENGTH) -> Workload:
    """Return what a small model computes."""
    return Workload(model=spec_by_formula(dict(config), name="small"), seq_len=length, lora=lora)


def levels(work: Workload, chosen: Plan, runtime: Runtime = SHARDWISE) -> dict[str, int]:
    """Return the highest level of every part of a step without sharding, as `blocks_truth.measure` names them."""
    computed = computation(work, runtime, "cpu")
    ends, parts = computed.ends(chosen), parts_of(computed, chosen)
    kept, found = 0, {}
    for name, part in parts.items():
        around = ends.shared if name != "embedding" else 0
        if name.startswith("block"):
            around += ends.in_forward
        if name.startswith("block") and name != "block 0" and not parts["block 0"].keeps_input:
            around += ends.carried
        found[name] = around + kept + part.forward.total
        kept += part.kept
    found["loss"] = ends.shared + kept
    gradients = 0
    for name, part in reversed(parts.items()):
        kept -= part.kept
        if part.backward.total:
            around = ends.shared if name != "embedding" else 0
            found[f"{name} backward"] = around + kept + part.backward.total + gradients
            gradients += _gradients(computed, chosen, name) if name != "embedding" else 0
    return found


def parts_of(computed: Computation, chosen: Plan) -> dict[str, PartMemory]:
    """Return every part of a model by name: `embedding`, `block 0`, ..., `head`."""
    setting, ends = chosen.activation_checkpointing, computed.ends(chosen)
    again, otherwise = modes_of(setting)
    parts = {"embedding": ends.embedding}
    for index, kind in enumerate(computed.workload.model.blocks):
        mode = again if is_checkpointed(setting, index) else otherwise
        parts[f"block {index}"] = computed.block(chosen, kind, checkpointing=mode, first=index == 0)
    return {**parts, "head": ends.head}


def _gradients(computed: Computation, chosen: Plan, name: str) -> int:
    """Return the bytes of the gradients of a part's weights."""
    ranks, model = chosen.mesh.tensor, computed.workload.model
    weights, item = computed.weights(ranks), 4 if chosen.dtypes.param == "fp32" else 2
    layers = weights.outside if name == "head" else weights.kinds[model.blocks[int(name.removeprefix("block "))]]
    total = 0
    for parameter in layers.trained:
        owner, _, last = parameter.rpartition(".")
        site = layers.sites.get(owner)
        word = site.word if site is not None else None
        split = word is not None and (last == "weight" or "col" in word)
        if name != "head" or owner == model.head or "norm" in owner or ".ln_" in owner:
            total += layers.sizes[parameter] // (ranks if split else 1)
    for site in layers.sites.values():
        column = site.word is not None and site.word.startswith("col")
        row = site.word is not None and site.word.startswith("row")
        total += site.rank * (site.inputs // (ranks if row else 1) + site.outputs // (ranks if column else 1))
    return total * item
