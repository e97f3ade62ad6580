"""The Runtime: which program runs a plan. shardwise runs FSDP2; published measurements come from others too."""

from __future__ import annotations

from typing import Literal

from shardwise.spec.strict import Strict

Sharding = Literal["fsdp2", "fsdp1", "none", "megatron"]
"""`fsdp2`: one DTensor per parameter; `fsdp1`: one flat parameter per unit; `none`: one GPU or DDP, without gathered
copies; `megatron`: tensor and pipeline parallelism with a distributed optimizer."""


class Runtime(Strict):
    """The program that runs a plan, where it is not shardwise."""

    sharding: Sharding = "fsdp2"
    """How it shards."""
    fused_norms: bool = False
    """Norms are one kernel that saves its input (`F.rms_norm`, compiled, or fused by hand); False: transformers'
    own, in several fp32 operations."""
    fused_loss: bool = False
    """Whole logits, then one kernel of cross entropy, without fp32 copies of the logits."""
    compiled: bool = False
    """Blocks are compiled: pointwise chains become one kernel and save less."""
