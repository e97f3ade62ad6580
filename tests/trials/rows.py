"""Measured rows for tests: one that is whole, to change."""

from __future__ import annotations

import copy
import json
from typing import Any

WHOLE: dict[str, Any] = {
    "id": "OWN-001",
    "source": "a run of ours",
    "model": {
        "name": "small",
        "params_b": 0.0117,
        "layers": 3,
        "hidden": 320,
        "heads": 5,
        "kv_heads": 5,
        "head_dim": 64,
        "ffn": 864,
        "vocab": 11008,
        "mlp": "swiglu",
        "tied_embeddings": False,
        "learned_positions": False,
        "experts": None,
    },
    "cluster": {"gpu": "A100-SXM-80GB", "num_gpus": 2, "gpus_per_node": 8, "link": "nvlink", "network": None},
    "plan": {
        "strategy": "FULL_SHARD",
        "replicate": 1,
        "shard": 2,
        "tensor": 1,
        "pipeline": 1,
        "context": 1,
        "reshard_after_forward": True,
        "fsdp_version": 2,
        "storage_dtype": "fp32",
        "compute_dtype": "bf16",
        "reduce_dtype": "fp32",
        "optimizer": "adamw",
        "optimizer_state_bytes_per_param": 8,
        "activation_checkpointing": "full",
        "loss": "eager",
        "attention": "sdpa",
        "compile": False,
        "offload": "none",
        "seq_len": 384,
        "micro_batch": 3,
        "accumulation": 1,
        "global_batch": 6,
    },
    "lora": None,
    "measured": {
        "outcome": "ok",
        "peak_gib": 0.5,
        "statistic": "allocated",
        "tokens_per_s_per_gpu": None,
        "step_time_s": None,
        "mfu": None,
    },
    "trust": "high",
    "use": ["memory", "feasibility"],
    "headline": [],
    "assumed": [],
    "notes": "",
}


def row(**changes: Any) -> dict[str, Any]:
    """Return a whole row with some fields changed; `plan__shard=4` is a field of a part."""
    made = copy.deepcopy(WHOLE)
    for key, value in changes.items():
        part, _, field = key.partition("__")
        if field:
            made[part][field] = value
        else:
            made[part] = value
    return made


def single(**changes: Any) -> dict[str, Any]:
    """Return a row of one process that trains in pure bf16."""
    alone = {
        "plan__strategy": "NO_SHARD",
        "plan__shard": 1,
        "plan__fsdp_version": None,
        "plan__reshard_after_forward": None,
        "plan__storage_dtype": "bf16",
        "plan__reduce_dtype": None,
        "plan__optimizer_state_bytes_per_param": 4,
        "plan__global_batch": 3,
        "cluster__num_gpus": 1,
    }
    return row(**{**alone, **changes})


def line(content: dict[str, Any]) -> str:
    """Return a row as a line of a file."""
    return json.dumps(content)
