"""A run that goes wrong stops, and says where."""

from __future__ import annotations

import re

import pytest
import torch
from torch.distributed.tensor import DTensor

from harness.ranks import run_ranks
from harness.runs import make_run, metrics, train
from shardwise.data.prepared import Rows
from shardwise.spec.layout import Mesh
from shardwise.train import checks, loop
from shardwise.train.checks import TrainingFailed, compare_ranks
from shardwise.train.signals import StopSignal
from shardwise.train.training import start

CPU = torch.device("cpu")


def _start(prepared):
    return start(prepared.folder, device=CPU, stop=StopSignal(), say=lambda text: None)


def _failure(call):
    try:
        call()
    except TrainingFailed as error:
        return str(error)
    return None


def test_numbers_that_differ_between_ranks_are_named_on_every_rank():
    def body(rank, world):
        equal = compare_ranks({"the step": 3, "the loss": 0.1}, rank == 1, CPU)
        overflow = compare_ranks({"the gradient norm": float("inf") if rank else float("nan")}, False, CPU)
        return equal, overflow, _failure(lambda: compare_ranks({"the step": 3, "the loss": 0.1 + rank}, False, CPU))

    words = "ranks drifted apart: the loss is 0.1 on one rank and 1.1 on another"
    assert run_ranks(body, 2) == [(True, False, words)] * 2


def _poisoned(rank, world, prepared, bad_rank, bad_forward):
    """The product's loop; one forward of one rank gives NaN."""
    training = _start(prepared)
    forwards = 0

    def spoil(module, args, kwargs, output):
        nonlocal forwards
        if module.training:
            forwards += 1
            if rank == bad_rank and forwards == bad_forward:
                output.logits = output.logits * float("nan")
        return output

    training.model.register_forward_hook(spoil, with_kwargs=True)
    return _failure(lambda: loop.run(training, progress=None))


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_loss_that_is_not_a_number_stops_with_its_rows(tiny, tmp_path, lora):
    prepared = make_run(tmp_path, tiny("llama"), use_lora=lora, log={"tensorboard": False, "evaluate_every": 0})
    found = run_ranks(_poisoned, 2, prepared, 1, 2)  # rank 1, second micro-batch
    assert found[0] == found[1]
    matched = re.search(
        r"step 1: loss nan .* not finite; first on rank 1 in micro-batch 2 of 2, which holds training rows (\d+)",
        found[0],
    )
    assert matched, found[0]
    rows = Rows.open(prepared.folder.data / "train.arrow")

    def rows_of_the_batch(rank, world):
        training = _start(prepared)
        batch = training.batches.micro_batches(0)[1]
        return batch.input_ids[0][batch.attention_mask[0].bool()].tolist()

    seen = run_ranks(rows_of_the_batch, 2)[1]
    assert seen == rows[int(matched[1]) - 1].input_ids


def test_gradients_that_are_not_finite_stop_too(tiny, tmp_path):
    prepared = make_run(tmp_path, tiny("llama"), use_lora=False)

    def body(rank, world):
        training = _start(prepared)
        parameter = next(p for p in training.model.parameters() if p.requires_grad)

        def spoil(p):
            local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            local.view(-1)[:1] = float("inf")

        parameter.register_post_accumulate_grad_hook(spoil)
        return _failure(lambda: loop.run(training, progress=None))

    found = run_ranks(body, 2, timeout=60)
    assert found[0] == found[1]
    assert "step 1" in found[0]
    assert "every forward's own loss was finite" in found[0]


def test_replicas_that_differ_are_found_before_a_checkpoint_is_written(tiny, tmp_path):
    prepared = make_run(tmp_path, tiny("llama"), use_lora=False, fsdp={"strategy": "NO_SHARD"})

    def body(rank, world):
        training = _start(prepared)
        before = _failure(lambda: checks.check_replicas(training.model, training.plan.mesh))
        if rank == 1:
            with torch.no_grad():
                next(training.model.parameters()).to_local().view(-1)[0] += 1e-3
        return before, _failure(lambda: loop.save_checkpoint(training))

    assert run_ranks(body, 2) == [(None, "ranks 0 and 1 hold copies of the same weights that differ")] * 2
    assert not list(prepared.folder.checkpoints.glob("step-*"))


def test_copies_over_the_tensor_axis_and_over_replicas_are_compared_apart(monkeypatch):
    digests = {0: ("a", "n"), 1: ("b", "n"), 2: ("a", "n"), 3: ("b", "n")}

    def found(change):
        mesh = Mesh(replicate=2, shard=1, tensor=2)
        mine = {**digests, **change}

        def gather(gathered, sent):
            gathered[:] = [mine[rank] for rank in range(4)]

        monkeypatch.setattr(checks, "_digest", lambda model, split: "")
        monkeypatch.setattr(checks.dist, "all_gather_object", gather)
        return _failure(lambda: checks.check_replicas(torch.nn.Linear(1, 1), mesh))

    assert found({}) is None
    assert "ranks 1 and 3" in found({3: ("c", "n")})
    assert "ranks 0 and 1" in found({1: ("b", "m")})


def test_an_adapter_without_a_gradient_is_named(tiny, tmp_path):
    prepared = make_run(tmp_path, tiny("llama"))

    def body(rank, world):
        training = _start(prepared)
        for name, parameter in training.model.named_parameters():
            if "layers.1" in name and "q_proj.lora_B" in name:
                parameter.register_post_accumulate_grad_hook(lambda p: p.grad.zero_())
        return _failure(lambda: loop.run(training, progress=None))

    found = run_ranks(body, 2)
    assert found[0] == found[1]
    assert "1 of 21 adapters got no gradient" in found[0]
    assert "layers.1.self_attn.q_proj.lora_B" in found[0]


def test_checks_can_be_left_out(tiny, tmp_path):
    prepared = make_run(tmp_path, tiny("llama"), steps=1, self_checks=False)
    assert run_ranks(train, 2, prepared)[0]["state"] == "finished"
    assert metrics(prepared)[-1]["step"] == 1
