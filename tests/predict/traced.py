"""Small workloads and plans to trace."""

from __future__ import annotations

from typing import Any

from shardwise.catalogue.clusters import find_cluster
from shardwise.catalogue.models import model_from_config
from shardwise.predict.fake import fake_rank
from shardwise.predict.shims import shims_of
from shardwise.predict.trace_run import Observed, observe
from shardwise.spec.layout import Mesh, Prefetch, ReduceScatter
from shardwise.spec.method import Lora
from shardwise.spec.plan import Dtypes, Plan
from shardwise.spec.workload import Workload

A10, H100, CPUS = find_cluster("8xA10"), find_cluster("8xH100-SXM-80GB"), find_cluster("8xcpu")

DTYPES = {"frozen_storage": None, "param": "bf16", "reduce": "fp32", "output": "fp32"}


def dtypes(**changes: Any) -> Dtypes:
    """bf16 computation, fp32 storage and reduction, but for what is named."""
    return Dtypes(**{**DTYPES, "buffer": None, "loss_scaling": False, **changes})


def plan(**changes: Any) -> Plan:
    """FULL_SHARD over 8 ranks with checkpointing, but for what is named."""
    fields: dict[str, Any] = {
        "strategy": "FULL_SHARD",
        "mesh": Mesh(shard=8),
        "reshard_after_forward": True,
        "prefetch": Prefetch(forward=0, backward=1, async_all_gather=True),
        "reduce_scatter": ReduceScatter(buffers=1, separate_group=False, asynchronous=True),
        "dtypes": dtypes(),
        "activation_checkpointing": "full",
        "attention": "sdpa",
        "micro_batch": 2,
        "accumulation_steps": 1,
    }
    return Plan(**{**fields, **changes})


SIZES = {
    "hidden_size": 96,
    "intermediate_size": 176,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1009,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}

LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
    "num_key_value_heads": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}

GPT2 = {"n_embd": 96, "n_head": 6, "n_positions": 512, "vocab_size": 1009, "bos_token_id": 1, "eos_token_id": 2}


def workload(family: str = "llama", *, layers: int = 4, seq_len: int = 37, **changes: Any) -> Workload:
    """A small model of a family; further fields are the workload's, `config` the configuration's."""
    config = dict(changes.pop("config", {}))
    if family == "gpt2":
        config = {**GPT2, "n_layer": layers, **config}
    else:
        config = {**SIZES, "num_hidden_layers": layers, **config}
    model = model_from_config({"model_type": family, "dtype": "float32", **config}, name=f"a small {family}")
    return Workload(model=model, seq_len=seq_len, **changes)


def at_full_depth(work: Workload, how: Plan, cluster: Any) -> Observed:
    """The same trace with every block."""
    with fake_rank(how.mesh, padded=work.padded) as rank:
        return observe(work, how, cluster, rank=rank, shims=shims_of(how, cluster), blocks=None)


LORA = Lora(rank=3)
