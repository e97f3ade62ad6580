"""Programs that are not shardwise, really run on one CPU: `python other_programs.py` prints the highest bytes of each.

One process, or rank 0 of two under FSDP1 with a group that is not there, as transformers' Trainer of version 4 set them
up: checkpointing outside of the FSDP units, entering autograd again or not; PEFT's adapters as units of their own.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from shardwise.catalogue.dimensions import model_from_dimensions
from shardwise.spec.cluster import Cluster
from shardwise.spec.method import Lora
from shardwise.spec.plan import Dtypes, Mesh, Plan, Prefetch, ReduceScatter
from shardwise.spec.runtime import Runtime
from shardwise.spec.workload import Workload

ROWS, LENGTH, STEPS = 3, 96, 3
TARGETS = ("q_proj", "v_proj")
MODEL = model_from_dimensions(
    layers=5,
    hidden=128,
    heads=4,
    kv_heads=2,
    head_dim=32,
    ffn=352,
    vocab=88,
    mlp="swiglu",
    tied=False,
    max_positions=256,
)


@dataclass(frozen=True)
class Program:
    """How one is set up."""

    world: int
    checkpointing: str
    lora: bool


PROGRAMS = {
    f"{'fsdp1' if world == 2 else 'one'}-{checkpointing}-{'lora' if lora else 'full'}": Program(
        world, checkpointing, lora
    )
    for world in (1, 2)
    for checkpointing in ("none", "again", "reentrant")
    for lora in (False, True)
}

Given = tuple[Workload, Plan, Cluster, Runtime]


def _given(program: Program) -> Given:
    """Return what `estimate` takes for a program."""
    lora = Lora(rank=8, alpha=16.0, dropout=0.05, targets=TARGETS) if program.lora else None
    plan = Plan(
        strategy="FULL_SHARD" if program.world > 1 else "NO_SHARD",
        mesh=Mesh(shard=program.world),
        reshard_after_forward=program.world > 1,
        prefetch=Prefetch(forward=0, backward=1, async_all_gather=True),
        reduce_scatter=ReduceScatter(buffers=1, separate_group=False, asynchronous=False),
        dtypes=Dtypes(
            frozen_storage="bf16" if program.lora else None,
            trained_storage="bf16",
            optimizer_state="bf16",
            param="bf16",
            reduce="bf16",
            output="bf16",
            buffer=None,
            loss_scaling=False,
        ),
        activation_checkpointing="none" if program.checkpointing == "none" else "full",
        attention="sdpa",
        micro_batch=ROWS,
        accumulation_steps=1,
    )
    runtime = Runtime(
        sharding="fsdp1" if program.world > 1 else "none",
        reentrant=program.checkpointing == "reentrant",
        drops_logits=True,
    )
    workload = Workload(model=MODEL, seq_len=LENGTH, lora=lora, held_out=False)
    return workload, plan, Cluster(name="cpu", nodes=1, per_node=program.world, gpu=None), runtime


ESTIMATES: dict[str, Callable[[], Given]] = {name: partial(_given, program) for name, program in PROGRAMS.items()}


def run_all() -> dict[str, dict[str, int]]:
    """Return the highest bytes of each phase of every program."""
    import torch

    from shardwise.engine.compat_fake import fake_group

    torch.set_num_threads(1)
    with fake_group(2):
        return {name: run(program) for name, program in PROGRAMS.items()}


def run(program: Program) -> dict[str, int]:
    """Train three steps and return the highest bytes of each phase of the last."""
    import torch

    from shardwise.measure.storages import StorageTracker

    model = _model(program)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, foreach=True)
    rows = torch.randint(0, MODEL.vocab, (ROWS, LENGTH))
    tracker = StorageTracker(model, optimizer)
    with tracker:
        for _ in range(STEPS):
            _step(model, optimizer, rows)
    found: dict[str, int] = {}
    for segment in tracker.segments():
        if segment.key.step == STEPS - 1:
            size = sum(segment.peak.values())
            found[segment.key.phase] = max(found.get(segment.key.phase, 0), size)
    return found


def _step(model, optimizer, rows) -> None:
    import torch

    ids, labels = rows.clone(), rows.clone()
    output = model(input_ids=ids, use_cache=False)
    logits = output.logits.float()
    del output
    logits = logits[:, :-1].contiguous()
    loss = torch.nn.functional.cross_entropy(logits.view(-1, MODEL.vocab), labels[:, 1:].reshape(-1))
    del logits
    loss.backward()
    del loss
    optimizer.step()
    optimizer.zero_grad()


def _model(program: Program):
    import torch
    from torch.utils.checkpoint import checkpoint
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**MODEL.config)
    config._attn_implementation = "sdpa"
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = _with_adapters(base) if program.lora else base
    reentrant = program.checkpointing == "reentrant"
    shard = _sharder(program) if program.world > 1 else None

    class Checkpointed(torch.nn.Module):
        def __init__(self, block: torch.nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, hidden, **rest):
            return checkpoint(partial(self.block, **rest), hidden, use_reentrant=reentrant)

    for place, block in enumerate(base.model.layers):
        inner = shard(block) if shard is not None else block
        base.model.layers[place] = inner if program.checkpointing == "none" else Checkpointed(inner)
    if reentrant and program.lora:
        base.get_input_embeddings().register_forward_hook(lambda _, __, output: output.requires_grad_())
    model.train()
    return shard(model, auto_wrap_policy=None) if shard is not None else model


def _with_adapters(base):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules=list(TARGETS))
    return get_peft_model(base, config, autocast_adapter_dtype=False)


def _sharder(program: Program):
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    def wrapped_by_itself(module, recurse, nonwrapped_numel) -> bool:
        """PEFT's policy: what trains, and has no modules within, is a unit."""
        weight = getattr(module, "weight", None)
        alone = not list(module.children()) and weight is not None and weight.requires_grad
        return recurse or (program.lora and alone)

    return partial(
        FullyShardedDataParallel,
        auto_wrap_policy=wrapped_by_itself if program.lora else None,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    print(json.dumps(run_all()))
