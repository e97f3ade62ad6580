"""The first step of every run is counted and its dtypes are read back; what is not as planned ends the run."""

from __future__ import annotations

import json

import pytest
import torch

from harness.ranks import run_ranks
from harness.runs import make_run, train
from shardwise.engine.apply import units
from shardwise.engine.readback import PlanNotHonoured
from shardwise.spec.collectives import Collectives
from shardwise.spec.ledger import DtypeLedger, LedgerRow
from shardwise.train import loop
from shardwise.train.signals import StopSignal
from shardwise.train.training import start

FULL = {"use_lora": False, "lora_dropout": 0.0, "lora_rank": 16}
TENSOR = {"mesh": {"tensor": 2}, "fsdp": {"strategy": "FULL_SHARD"}}
SEQUENCE = {"mesh": {"tensor": 2, "sequence_parallel": True}, "fsdp": {"strategy": "FULL_SHARD"}}

RUNS = {
    "lora": (2, "llama", {}),
    "full-bf16": (2, "llama", {**FULL, "mixed_precision": {"param_dtype": "bf16"}}),
    "fp16": (2, "llama", {**FULL, "mixed_precision": {"param_dtype": "fp16"}}),
    "bf16-reduced": (2, "llama", {**FULL, "mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "bf16"}}),
    "bf16-stored": (2, "llama", {**FULL, "mixed_precision": {"param_dtype": "bf16", "storage_dtype": "bf16"}}),
    "bf16-states": (2, "llama", {**FULL, "optimizer_state_dtype": "bf16"}),
    "states-on-the-host": (2, "llama", {**FULL, "offload": {"optimizer": True}}),
    "momentum": (2, "llama", {**FULL, "optimizer": "sgd", "momentum": 0.9}),
    "chunked": (2, "llama", {"loss_head": "chunked", "loss_chunk": 5}),
    "selective": (2, "qwen2", {**FULL, "activation_checkpointing": "selective"}),
    "hybrid": (4, "llama", {"fsdp": {"strategy": "HYBRID_SHARD"}, "mesh": {"shard": 2}, "accumulation": "defer_all"}),
    "tensor": (4, "llama", {**FULL, **TENSOR}),
    "tensor-qwen2": (4, "qwen2", {**FULL, **TENSOR, "activation_checkpointing": "full"}),
    "sequence": (4, "mistral", {**FULL, **SEQUENCE}),
    "tensor-lora": (4, "llama", {**TENSOR}),
}


def _first_step(prepared):
    found = json.loads(prepared.folder.first_step.read_text())
    collectives = Collectives.model_validate_json(json.dumps(found["collectives"]))
    return collectives, DtypeLedger.model_validate_json(json.dumps(found["dtypes"]))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_does_what_its_plan_says(tiny, tmp_path, name):
    world, family, fields = RUNS[name]
    folder = tiny(family, kv=2)
    fields = {"steps": 2, "global_batch": 4 if world == 2 else 8, **fields}
    prepared = make_run(tmp_path, folder, world=world, **fields)
    results = run_ranks(train, world, prepared)
    assert {result["state"] for result in results} == {"finished"}
    collectives, dtypes = _first_step(prepared)
    assert collectives.rows
    assert dtypes.differences() == ()
    roles = {row.role: row for row in dtypes.rows}
    param = prepared.preview.plan.dtypes.param
    assert roles["weights, gathered and computed with"].live == (param,)
    assert roles["rotary tables"].live == ("fp32",)
    stored = roles["trained weights, stored"]
    assert roles["gradients, stored"].bytes == stored.bytes
    if name in ("bf16-states", "states-on-the-host"):
        suffix = ", on the host" if "host" in name else ""
        moment = roles["optimizer state exp_avg" + suffix]
        assert (moment.live, moment.bytes) == (
            (("bf16",), stored.bytes // 2) if not suffix else (("fp32",), stored.bytes)
        )


def _wrong_dtype(training):
    parameter = next(p for p in training.model.parameters() if p.requires_grad)
    training.optimizer.register_step_post_hook(
        lambda optimizer, args, kwargs: optimizer.state[parameter].update(
            exp_avg=optimizer.state[parameter]["exp_avg"].bfloat16()
        )
    )


def _one_more_gather(training):
    block = units(training.model)[1]

    def forward(module, args, kwargs):
        block.reshard()
        block.unshard()

    block.register_forward_pre_hook(forward, with_kwargs=True)


def _kept_gathered(training):
    training.model.set_reshard_after_forward(False, recurse=True)


CHANGES = {
    _wrong_dtype: "dtype of optimizer state exp_avg is bf16 and fp32, planned fp32",
    _one_more_gather: "all_gather over shard: counted",
    _kept_gathered: "all_gather over shard: counted 4 calls",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_what_is_not_as_planned_ends_the_run(tiny, tmp_path, change):
    prepared = make_run(
        tmp_path, tiny("llama"), fsdp={"strategy": "FULL_SHARD"}, global_batch=2, use_lora=False, steps=2
    )

    def body(rank, world):
        training = start(prepared.folder, device=torch.device("cpu"), stop=StopSignal(), say=lambda text: None)
        change(training)
        with pytest.raises(PlanNotHonoured) as caught:
            loop.run(training, progress=None)
        return str(caught.value)

    for found in run_ranks(body, 2):
        assert CHANGES[change] in found


def test_nothing_stays_installed_after_the_first_step(tiny, tmp_path):
    prepared = make_run(tmp_path, tiny("llama"), steps=2)

    def body(rank, world):
        training = start(prepared.folder, device=torch.device("cpu"), stop=StopSignal(), say=lambda text: None)

        def hooks():
            modules = list(training.model.modules())
            return (
                sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules),
                len(training.optimizer._optimizer_step_pre_hooks) + len(training.optimizer._optimizer_step_post_hooks),
                torch._C._len_torch_dispatch_stack(),
            )

        before = hooks()
        loop.run(training, progress=None)
        return before, hooks()

    for before, after in run_ranks(body, 2):
        assert before == after


def test_a_role_is_honoured_only_in_its_planned_dtype_alone():
    row = LedgerRow(role="gradients", planned="fp32", live=("bf16", "fp32"))
    assert DtypeLedger(rows=(row,)).differences() == ("dtype of gradients is bf16 and fp32, planned fp32",)
    assert LedgerRow(role="buffers", planned="as loaded", live=("bf16",)).honoured
