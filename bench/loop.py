"""Tokens per second of shardwise's training step against a short hand-written FSDP2 loop: python bench/loop.py

Both train the same model on the same rows in the same processes, full fine-tuning with AdamW and clipping, and take
turns: each round times every side on the same batches, in alternating order, so that a slow moment of the machine hits
all of them. The last line is the median over rounds of (shardwise / hand-written). Their losses are compared as well.

It runs on every GPU, else on 2 gloo processes; torchrun --nproc_per_node=N bench/loop.py takes another number. Where
accelerate is installed its loop takes turns with them, for reference.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import run as torchrun
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from shardwise.data.loader import Batch, TrainBatches, pad_token_id
from shardwise.data.prepared import prepare
from shardwise.engine.load import load_model
from shardwise.engine.mesh import build_mesh
from shardwise.engine.optimizer import build_optimizer
from shardwise.engine.scaler import build_scaler
from shardwise.engine.source import open_source
from shardwise.machine.prepare import preview
from shardwise.spec.reader import read_job_dict
from shardwise.train.step import training_step

DEMO = Path(__file__).resolve().parent.parent / ".cache" / "demo"
LEARNING_RATE, MAX_NORM = 1e-5, 1.0

Step = Callable[[Sequence[Batch]], float]
"""Trains on this rank's micro-batches of one global batch; returns the loss over the global batch."""


def hand_written(folder: str, device: torch.device, precision: str) -> Step:
    """The loop that one would write without shardwise."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = low if precision == "bf16" else MixedPrecisionPolicy()
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=fused, foreach=not fused
    )

    def step(batches: Sequence[Batch]) -> float:
        tokens = _summed(sum(batch.trained_tokens for batch in batches), device)
        total = torch.zeros((), device=device)
        for batch in batches:
            batch = batch.to(device)
            loss = _loss(model, batch) / tokens
            torch.autograd.backward(loss * dist.get_world_size())  # FSDP2 averages gradients over ranks
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return _summed(float(total), device)

    return step


def with_shardwise(folder: str, device: torch.device, precision: str, micro_batch: int) -> Step:
    """shardwise's own step, as `shardwise train` calls it."""
    world = dist.get_world_size()
    values = {
        "model": folder,
        "data": "rows.jsonl",
        "fsdp": "full_shard",
        "mixed_precision": precision,
        "micro_batch": micro_batch,
        "global_batch": micro_batch * world,
    }
    seen = preview(read_job_dict(values), nproc=world)
    model = load_model(seen.job, seen.plan, open_source(seen.job.model), build_mesh(seen.plan.mesh, device.type))
    optimizer = build_optimizer(model, seen.plan, learning_rate=LEARNING_RATE, weight_decay=0.0)
    scaler = build_scaler(seen.plan, device.type)

    def step(batches: Sequence[Batch]) -> float:
        result = training_step(
            model, batches, plan=seen.plan, optimizer=optimizer, scaler=scaler, max_grad_norm=MAX_NORM, device=device
        )
        assert result is not None, "nobody asks to stop"
        return result.loss

    return step


def with_accelerate(folder: str, device: torch.device, precision: str) -> tuple[Step, str]:
    """accelerate with its FSDP2 plugin; returns the step and the name of what `prepare` made of the model."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    mixed_precision = "bf16" if precision == "bf16" else "no"
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=mixed_precision, fsdp_plugin=plugin)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(batches: Sequence[Batch]) -> float:
        tokens = _summed(sum(batch.trained_tokens for batch in batches), device)
        total = torch.zeros((), device=device)
        for batch in batches:
            batch = batch.to(device)
            loss = _loss(model, batch) / tokens
            accelerator.backward(loss * dist.get_world_size())
            total += loss.detach()
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return _summed(float(total), device)

    return step, type(model).__name__


def _loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    labels = batch.labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels, reduction="sum")


def _summed(value: float, device: torch.device) -> float:
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.item()


def this_device() -> torch.device:
    """This rank's device."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def measure(
    sides: dict[str, Step], rounds: list[list[list[Batch]]]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return tokens per second of each side in each round, and every loss; the first round only warms up."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    for number, steps in enumerate(rounds):
        tokens = sum(int(batch.attention_mask.sum()) for batches in steps for batch in batches)
        names = list(sides) if number % 2 == 0 else list(reversed(sides))
        for name in names:
            dist.barrier()
            started = time.perf_counter()
            losses[name] += [sides[name](batches) for batches in steps]
            dist.barrier()
            seconds = time.perf_counter() - started
            if number > 0:
                rates[name].append(_summed(tokens, this_device()) / seconds)
    return rates, losses


def draw(folder: str, data: str, *, micro_batch: int, rounds: int, steps: int) -> list[list[list[Batch]]]:
    """Return this rank's micro-batches: [round][step][micro-batch], one round more than asked for."""
    world = dist.get_world_size()
    job = read_job_dict({"model": folder, "data": data})
    tokenizer = open_source(job.model).tokenizer()
    assert job.data is not None
    rows = prepare(job.data, tokenizer, seq_len=1024, seed=0).train
    batches = TrainBatches(
        rows,
        seed=0,
        global_batch=micro_batch * world,
        micro_batch=micro_batch,
        rank=dist.get_rank(),
        data_ranks=world,
        pad_id=pad_token_id(tokenizer),
    )
    position, drawn = 0, []
    for _ in range((rounds + 1) * steps):
        drawn.append(batches.micro_batches(position))
        position = batches.next_position(position)
    return [drawn[start : start + steps] for start in range(0, len(drawn), steps)]


def bench(given: argparse.Namespace) -> None:
    """Measure on the ranks of an initialised process group; rank 0 prints."""
    device = this_device()
    rounds = draw(given.model, given.data, micro_batch=given.micro_batch, rounds=given.rounds, steps=given.steps)
    sides = {
        "shardwise": with_shardwise(given.model, device, given.mixed_precision, given.micro_batch),
        "hand-written": hand_written(given.model, device, given.mixed_precision),
    }
    prepared = ""
    if not given.no_accelerate and find_spec("accelerate") is not None:
        sides["accelerate"], prepared = with_accelerate(given.model, device, given.mixed_precision)
    rates, losses = measure(sides, rounds)
    if dist.get_rank() != 0:
        return
    print(
        f"{Path(given.model).name}, {given.mixed_precision}, full fine-tuning, {dist.get_world_size()} {device.type} "
        f"ranks; {given.rounds} rounds of {given.steps} steps, {given.micro_batch} rows per rank and step"
    )
    apart = max(abs(one - other) for one, other in zip(losses["shardwise"], losses["hand-written"], strict=True))
    print(f"losses of {len(losses['shardwise'])} steps differ by at most {apart:.1e}")
    median = {name: statistics.median(values) for name, values in rates.items()}
    if prepared:
        note = "" if prepared.startswith("FSDP") else f": it prepared {prepared} here, not FSDP2, without saying so"
        print(f"for reference, accelerate: {median['accelerate']:.0f} tokens/s{note}")
    ratios = [ours / theirs for ours, theirs in zip(rates["shardwise"], rates["hand-written"], strict=True)]
    print("ratio by round: " + " ".join(f"{ratio:.2f}" for ratio in ratios))
    print(
        f"ratio: {statistics.median(ratios):.2f} (shardwise {median['shardwise']:.0f} tokens/s, "
        f"hand-written {median['hand-written']:.0f} tokens/s)"
    )


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description="shardwise's training step against a hand-written FSDP2 loop.")
    parser.add_argument("--model", default=str(DEMO / "SmolLM2-135M-Instruct"), help="folder of a Llama-like model")
    parser.add_argument("--data", default=str(DEMO / "faq-train.jsonl"))
    parser.add_argument("--mixed-precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--micro-batch", type=int, default=2, help="rows per rank and step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="steps per side and round")
    parser.add_argument("--no-accelerate", action="store_true", help="leave accelerate's loop out")
    given = parser.parse_args()
    if "RANK" not in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        ranks = torch.cuda.device_count() or 2
        arguments = ["--standalone", f"--nproc-per-node={ranks}", __file__, *sys.argv[1:]]
        torchrun.run(torchrun.parse_args(arguments))  # type: ignore[no-untyped-call]
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    disable_progress_bar()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        bench(given)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
