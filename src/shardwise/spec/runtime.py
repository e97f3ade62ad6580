"""The Runtime: which program runs a plan. shardwise runs FSDP2; published measurements come from others too."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shardwise.spec.strict import Strict

Sharding = Literal["fsdp2", "fsdp1", "none", "megatron"]
"""`fsdp2`: one DTensor per parameter; `fsdp1`: one flat parameter per unit; `none`: one GPU or DDP, without gathered
copies (over a shard axis: gradients and optimizer states are sharded, weights are not, as in ZeRO-2); `megatron`:
tensor and pipeline parallelism with a distributed optimizer."""

Quantization = Literal["nf4", "nf4-dq", "int8", "gptq4"]
"""`nf4`: 4 bits and a constant per 64 weights; `nf4-dq`: these constants quantised once more; `int8`: 8 bits and a
constant per row; `gptq4`: 4 bits and a constant per 128 weights."""


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
    reentrant: bool = False
    """Checkpointing enters autograd once more (transformers' Trainer before version 5): a recomputed block's output
    lives as long as its backward, and FSDP1 gathers nothing ahead in backward."""
    every_second_matmul: bool = False
    """Selective checkpointing keeps every second matrix product (torchtitan's); False: all of large inner dimension."""
    upcasts_logits: bool = True
    """Logits are turned into fp32 before the loss; False: the loss takes them as they are (GPT-like classes of
    transformers 4 and Composer)."""
    drops_logits: bool = False
    """The loss is transformers 4's, made inside the model from logits that nothing else holds; False: shardwise's own,
    made outside of it from what leaves the model in the plan's output dtype."""
    keeps_cache: bool = False
    """Keys and values of all blocks, and the fused projections that they are views of, live until the model's forward
    returns, though nothing reads them (GPT-BigCode of transformers 4: checkpointing leaves its cache on)."""
    parallel_loss: bool = False
    """Over a tensor axis each rank has the logits of its part of the vocabulary only, in the loss too."""
    autocast: bool = False
    """torch.autocast computes in the compute dtype: layer norms give fp32, which a quantised linear layer hands on and
    a plain one casts; adapters and other weights may rest in fp32."""
    base_quantization: Quantization | None = None
    """How linear layers of the frozen blocks are stored; None: in the plan's dtype of frozen weights."""
    attention_kernel: Literal["flash", "triton"] | None = None
    """What computes fused attention: FlashAttention 2, or FlashAttention 1 written in Triton; None: what torch 2.13
    chooses on the card."""
    fp8_linears: bool = False
    """Matrix products of the blocks' linear layers are in fp8, their inputs cast before; the rest as the plan says."""
    optimizer_bytes: Annotated[float, Field(ge=0)] | None = None
    """Bytes of optimizer states per trained parameter, a master copy included; None: those of the plan's optimizer."""
    step_in_backward: bool = False
    """Every gradient is used up, and freed, as soon as it is there."""


SHARDWISE = Runtime()
"""shardwise itself."""
