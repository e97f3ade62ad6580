"""The features that are combined: each value by name, as a user would write it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

Settings = dict[str, Any]
Row = dict[str, str]
"""Feature -> name of its value."""
Item = tuple[str, str]
"""A feature and the name of one of its values."""
Pair = tuple[Item, Item]
"""Values of two features, in the order of `FEATURES`."""

GLOBAL_BATCH = 8

BF16: Settings = {"param_dtype": "bf16"}

FEATURES: dict[str, dict[str, Settings]] = {
    "strategy": {
        "FULL_SHARD": {"fsdp": {"strategy": "FULL_SHARD"}},
        "SHARD_GRAD_OP": {"fsdp": {"strategy": "SHARD_GRAD_OP"}},
        "HYBRID_SHARD": {"fsdp": {"strategy": "HYBRID_SHARD"}, "mesh": {"replicate": 2, "shard": 2}},
        "HYBRID_SHARD_ZERO2": {"fsdp": {"strategy": "HYBRID_SHARD_ZERO2"}, "mesh": {"replicate": 2, "shard": 2}},
        "NO_SHARD": {"fsdp": {"strategy": "NO_SHARD"}},
        "groups of 2": {"fsdp": {"strategy": "FULL_SHARD", "reshard_after_forward": 2}},
    },
    "tensor": {
        "1": {},
        "2": {"mesh": {"tensor": 2}},
        "2, sequence": {"mesh": {"tensor": 2, "sequence_parallel": True}},
    },
    "method": {"full": {}, "LoRA": {"use_lora": True, "lora_rank": 3}},
    "checkpointing": {name: {"activation_checkpointing": name} for name in ("none", "full", "every_2", "selective")},
    "accumulation": {
        "none": {"accumulation": "reduce_each"},
        "reduce_each": {"accumulation": "reduce_each"},
        "defer_all": {"accumulation": "defer_all"},
        "defer_replicate": {"accumulation": "defer_replicate"},
    },
    "precision": {
        "fp32": {},
        "bf16": {"mixed_precision": BF16},
        "bf16 reduced": {"mixed_precision": {**BF16, "reduce_dtype": "bf16"}},
        "bf16 stored": {"mixed_precision": {**BF16, "storage_dtype": "bf16"}},
        "fp16": {"mixed_precision": {"param_dtype": "fp16"}},
    },
    "prefetch": {
        "0": {"prefetch": 0},
        "1": {"prefetch": 1},
        "2": {"prefetch": 2},
        "blocking": {"prefetch": {"async_all_gather": False}},
    },
    "reductions": {
        "blocking": {"reduce_scatter": {"asynchronous": False}},
        "background": {"reduce_scatter": {"asynchronous": True}},
        "own group": {"reduce_scatter": {"separate_group": True}},
    },
    "units": {
        "blocks": {},
        "own embedding, head": {"units": {"embedding": "own", "head": "own"}},
        "every Linear": {"units": {"wrap": ["Linear"]}},
    },
    "offload": {
        "none": {},
        "optimizer": {"offload": "optimizer"},
        "parameters": {"offload": "parameters"},
        "activations": {"offload": "activations"},
    },
    "loss head": {
        "eager": {},
        "chunked": {"loss_head": "chunked", "loss_chunk": 16},
        "fused": {"loss_head": "fused"},
    },
    "optimizer": {
        "foreach": {"optimizer_implementation": "foreach"},
        "fused": {"optimizer_implementation": "fused"},
        "for_loop": {"optimizer_implementation": "for_loop"},
        "bf16 states": {"optimizer_state_dtype": "bf16"},
        "sgd": {"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.1},
        "8-bit": {"optimizer": "adamw_8bit"},
    },
    "compile": {"off": {}, "on": {"compile": True}},
    "attention": {name: {"model": {"attention": name}} for name in ("sdpa", "eager", "flash_attention_2")},
    "weights": {"untied": {}, "tied": {}},
}
"""Feature -> value -> how it is written in a configuration file."""

CORE = ("strategy", "method", "checkpointing", "accumulation", "precision", "prefetch")
"""Features between which nothing is refused, but for what has no meaning."""

TRIPLE = ("strategy", "method", "precision")
"""Features of which every three values that can stand together are run together."""

GPU_KERNELS = {"loss head": "fused", "attention": "flash_attention_2"}
"""Feature -> its value whose kernel exists on GPUs only."""

COST = {("compile", "on"): 3, ("tensor", "2"): 1, ("tensor", "2, sequence"): 1} | {
    ("strategy", name): 1 for name in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "groups of 2")
}
"""Values that make a run dear."""

APART = tuple(
    (("checkpointing", checkpointing), ("units", "every Linear"), ("compile", "on"))
    for checkpointing in ("full", "selective")
)
"""Threes that are refused where any two of them run: torch does not trace hooks of units inside a checkpoint."""

SPLIT_WORLD = {"HYBRID_SHARD": 4, "HYBRID_SHARD_ZERO2": 4, "groups of 2": 4}
"""Strategy -> data ranks that it is run on; the others: 2."""


def all_pairs() -> Iterator[Pair]:
    """Yield every pair of values of two features."""
    for one, other in combinations(FEATURES, 2):
        for value in FEATURES[one]:
            for second in FEATURES[other]:
                yield (one, value), (other, second)


def pairs_of(row: Row) -> Iterator[Pair]:
    """Yield the pairs of values in a row, which may leave features out."""
    yield from combinations([(feature, row[feature]) for feature in FEATURES if feature in row], 2)


def data_ranks(row: Row) -> int:
    """Return how many ranks see different rows."""
    return SPLIT_WORLD.get(row.get("strategy", "FULL_SHARD"), 2)


def world_of(row: Row) -> int:
    """Return the number of ranks of a row."""
    return data_ranks(row) * (2 if row.get("tensor", "1") != "1" else 1)


def settings_of(row: Row, folder: str) -> Settings:
    """Return a row, which may leave features out, as the content of a configuration file for the model in `folder`."""
    settings: Settings = {
        "model": {"path": folder},
        "data": {"path": "unused.jsonl"},
        "global_batch": GLOBAL_BATCH,
        "micro_batch": GLOBAL_BATCH // data_ranks(row) // (2 if row.get("accumulation", "none") != "none" else 1),
        "learning_rate": 1e-3,
        "weight_decay": 0.01,
        "max_grad_norm": 0.5,
    }
    if row.get("attention") == GPU_KERNELS["attention"] and "precision" not in row:
        settings["mixed_precision"] = "bf16"  # its kernels take no fp32
    for feature, value in row.items():
        _merge(settings, FEATURES[feature][value])
    return settings


def model_of(row: Row) -> dict[str, Any]:
    """Return the options of the tiny checkpoint that a row is run on.

    An even vocabulary where a tensor axis is to split it. A wider model for the 8-bit optimizer, which keeps small
    shards whole. Weights that bf16 can hold, so that every storage starts from the same ones.
    """
    options: dict[str, Any] = {"tied": row.get("weights") == "tied"}
    if row.get("tensor", "1") != "1":
        options |= {"vocab": 102, "kv": 2}
    if row.get("optimizer") == "8-bit":
        options |= {"heads": 4, "kv": 2, "intermediate_size": 128}
    return options


def _merge(into: Settings, given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if isinstance(value, Mapping):
            _merge(into.setdefault(key, {}), value)
        else:
            into[key] = value
