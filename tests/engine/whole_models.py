"""Tiny random models built in every process alike, and the same model on one process or on two ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from engine.training import full
from shardwise.data.loader import Batch
from shardwise.engine.blocks import find_blocks
from shardwise.engine.compat import operator_name, sum_gradients
from shardwise.engine.loss_head import token_loss
from shardwise.engine.names import unwrapped_name

VOCAB = 101

FAMILIES = {
    "llama": {},
    "gpt_neox": {},
    "gemma2": {"final_logit_softcapping": 3.0},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1},
}


def make_model(family="llama", *, lora=None, seed=0, **options):
    """A random causal LM; `lora`: further options of LoraConfig."""
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "pad_token_id": 1,
        **FAMILIES[family],
        **options,
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))
    if lora is not None:
        common = {"task_type": "CAUSAL_LM", "r": 3, "target_modules": "all-linear", "init_lora_weights": False}
        model = get_peft_model(model, LoraConfig(**{**common, **lora}))
    return model.train()


def make_batch(seed=0, rows=2, length=11):
    """Rows of random tokens; the second ends early, and about half of the labels are trained."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCAB, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1:, length - 3 :] = 0
    learnt = (torch.rand(ids.shape, generator=generator) < 0.5) & (mask == 1)
    return Batch(input_ids=ids, attention_mask=mask, labels=ids.where(learnt, torch.tensor(-100)))


@dataclass
class Gradients:
    """Loss and whole gradients of one forward and backward."""

    loss: torch.Tensor
    by_name: dict[str, torch.Tensor]


def gradients(model, batch):
    """Forward and backward of a batch's token loss, with the same random draws every time."""
    model.zero_grad()
    torch.manual_seed(5)
    loss = token_loss(model, batch)
    loss.backward()
    found = {unwrapped_name(name): full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return Gradients(loss=loss.detach(), by_name=found)


def shard(model, *, strategy="FULL_SHARD", own=(), policy=None):
    """FSDP2 over all ranks: a unit for every block and for each group of modules in `own`."""
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    if strategy == "NO_SHARD":
        mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
    reshard = strategy == "FULL_SHARD"
    policy = policy or MixedPrecisionPolicy()
    inner = MixedPrecisionPolicy(param_dtype=policy.param_dtype, reduce_dtype=policy.reduce_dtype)
    units = [*find_blocks(model).modules, *own]
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=inner)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for unit in [model, *(unit[0] if isinstance(unit, list) else unit for unit in units)]:
        sum_gradients(unit)
    return model


class Collectives(TorchDispatchMode):
    """Counts collectives by operator."""

    def __init__(self):
        super().__init__()
        self.counted = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator_name(operator)
        if "c10d" in name:
            self.counted[name] += 1
        return operator(*args, **(kwargs or {}))


def assert_equal(live, alone):
    """To the bit."""
    assert torch.equal(live.loss, alone.loss)
    assert live.by_name.keys() == alone.by_name.keys()
    for name, gradient in live.by_name.items():
        assert torch.equal(gradient, alone.by_name[name]), name


def assert_close(live, alone, tolerance=1e-6):
    """Relative to the largest gradient of the model: some (biases of keys) are zero but for rounding."""
    assert abs(live.loss - alone.loss) <= tolerance * abs(alone.loss)
    assert live.by_name.keys() == alone.by_name.keys()
    largest = max(gradient.abs().max() for gradient in alone.by_name.values())
    for name, gradient in live.by_name.items():
        assert (gradient - alone.by_name[name]).abs().max() <= tolerance * largest, name
