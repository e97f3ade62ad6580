"""How much of FSDP2's communication disappears behind compute on a slow link: python bench/overlap.py [--json]

Two hosts of a lab (`docs/lab.md`, needs root) share a slow link. The same model trains on them in three ways that take
turns within one run: FSDP2 written by hand with torch's defaults and the same dtypes, micro-batch and reshard flag;
DistributedDataParallel; and shardwise's own step. Printed for each: seconds a step (median over rounds) and exposed
communication, the time in which a collective was under way and nothing was computed, from a profile of one more step.

`bound` is shardwise's step over max(compute, communication): compute is the same step in one process, on both hosts at
once as they share the machine; communication is the bytes that the plan sends, over the link's rate.
`--loopback` takes the slow link away, `--linear-units` makes every linear layer a unit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from planned_step import LEARNING_RATE, MAX_NORM, planned_step, random_rows, save_llama
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from shardwise.data.loader import Batch
from shardwise.measure.spans import spans_of
from shardwise.predict.collectives import collectives_of_step
from shardwise.predict.wire import wire_bytes
from shardwise.trials.lab import Lab, unavailable

VOCAB, ROWS, LENGTH = 101, 4, 256

Step = Callable[[Batch], float]
"""Trains on this rank's rows; returns the loss over the global batch."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison."""

    dtype: str
    """Dtype of gathered weights; gradients are reduced in fp32."""
    strategy: str
    """FULL_SHARD or SHARD_GRAD_OP."""
    linear_units: bool
    """Every linear layer is a unit, on both sides."""
    prefetch: int | None
    """shardwise's prefetch depth; None: its default."""
    buffers: int | None
    """shardwise's reductions in flight; None: its default."""


def rows_of(step: int) -> Batch:
    """This rank's rows of a step."""
    return random_rows(VOCAB, ROWS, LENGTH, seed=1000 * step + dist.get_rank())


def loss_of(model: nn.Module, batch: Batch, tokens: float) -> torch.Tensor:
    """Summed token loss over the tokens of the global batch."""
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    labels = batch.labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels, reduction="sum") / tokens


def summed(value: float) -> float:
    """Sum over ranks."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def by_hand(model: nn.Module, *, averaged: bool, autocast: bool = False) -> Step:
    """A plain training step; `averaged`: the wrapper averages gradients over ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, foreach=True)
    factor = dist.get_world_size() if averaged else 1

    def step(batch: Batch) -> float:
        tokens = summed(batch.trained_tokens)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model, batch, tokens)
        torch.autograd.backward(loss * factor)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return summed(float(loss.detach()))

    return step


def fsdp2_by_hand(folder: str, case: Case) -> tuple[Step, nn.Module]:
    """FSDP2 with torch's defaults."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = low if case.dtype == "bf16" else MixedPrecisionPolicy()
    reshard = case.strategy == "FULL_SHARD"
    linears = [module for module in model.model.layers.modules() if isinstance(module, nn.Linear)]
    for unit in linears if case.linear_units else model.model.layers:
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return by_hand(model, averaged=True), model


def with_shardwise(folder: str, case: Case) -> tuple[Step, nn.Module, float]:
    """shardwise's own step, and the bytes that its plan sends per step and rank."""
    world = dist.get_world_size()
    values: dict[str, object] = {
        "fsdp": case.strategy.lower(),
        "mixed_precision": {"param_dtype": case.dtype, "reduce_dtype": "fp32"},
        "micro_batch": ROWS,
        "global_batch": ROWS * world,
        "seq_len": LENGTH,
    }
    if case.linear_units:
        values["units"] = {"wrap": ["Linear"]}
    if case.prefetch is not None:
        values["prefetch"] = case.prefetch
    if case.buffers is not None:
        values["reduce_scatter"] = {"buffers": case.buffers}
    made = planned_step(folder, values)
    sent = wire_bytes(collectives_of_step(made.plan, made.units, device_type="cpu"), made.plan.mesh)
    return lambda batch: made.step([batch]), made.model, sent.payload_bytes


def measure(case: Case, folder: str, rounds: int) -> dict[str, object]:
    """Compare the sides on the ranks of an initialised process group."""
    alone = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    replicated = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    hand, hand_model = fsdp2_by_hand(folder, case)
    ours, our_model, sent = with_shardwise(folder, case)
    low = case.dtype == "bf16"
    sides: dict[str, Step] = {
        "hand-written": hand,
        "shardwise": ours,
        "ddp": by_hand(DistributedDataParallel(replicated), averaged=True, autocast=low),
        "compute": by_hand(alone, averaged=False, autocast=low),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        batch = rows_of(number)
        for name in list(sides) if number % 2 == 0 else list(reversed(sides)):
            dist.barrier()
            started = time.perf_counter()
            losses[name].append(sides[name](batch))
            dist.barrier()
            if number > 0:
                seconds[name].append(time.perf_counter() - started)
    exposed = {name: profiled(sides[name], rows_of(rounds + 1)) for name in sides if name != "compute"}
    return {
        "dtype": case.dtype,
        "strategy": case.strategy,
        "units": "every linear" if case.linear_units else "blocks",
        "seconds": seconds,
        "exposed_s": exposed,
        "sent_bytes": sent,
        "loss_apart": max(abs(a - b) for a, b in zip(losses["shardwise"], losses["hand-written"], strict=True)),
        "weights_apart": apart(our_model, hand_model),
    }


def profiled(step: Step, batch: Batch) -> dict[str, float]:
    """Exposed communication of one step by kind, and in all."""
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step(batch)
    spans = spans_of(recorded)
    return {**spans.exposed(), "all": spans.exposed_total()}


@torch.no_grad()
def apart(one: nn.Module, other: nn.Module) -> float:
    """Largest difference between this rank's shards of two models."""
    theirs = dict(other.named_parameters())
    return max(float((shard(p) - shard(theirs[n])).abs().max()) for n, p in one.named_parameters())


def shard(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    assert isinstance(parameter, DTensor), "every parameter is sharded"
    return parameter.to_local()


def work(given: argparse.Namespace) -> None:
    """Be one rank; rank 0 writes the results."""
    disable_progress_bar()
    dist.init_process_group("gloo")
    cases = [
        Case(
            dtype=dtype,
            strategy=strategy,
            linear_units=given.linear_units,
            prefetch=given.prefetch,
            buffers=given.buffers,
        )
        for strategy in given.strategy
        for dtype in given.dtype
    ]
    results = [measure(case, given.folder, given.rounds) for case in cases]
    if dist.get_rank() == 0:
        Path(given.folder, "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def summary(result: dict[str, object], rate: float | None) -> dict[str, object]:
    """Medians and ratios of one case; ratios are medians over rounds of ratios within a round."""
    seconds: dict[str, list[float]] = result["seconds"]  # type: ignore[assignment]
    step = {name: statistics.median(values) for name, values in seconds.items()}
    communication = 0.0 if rate is None else float(result["sent_bytes"]) * 8 / (rate * 1e6)  # type: ignore[arg-type]
    pairs = zip(seconds["hand-written"], seconds["shardwise"], strict=True)
    return {
        **{key: value for key, value in result.items() if key != "seconds"},
        "step_s": step,
        "communication_s": communication,
        "speedup": statistics.median(theirs / ours for theirs, ours in pairs),
        "bound": step["shardwise"] / max(step["compute"], communication),
    }


def show(found: dict[str, object]) -> None:
    """Print one case."""
    step: dict[str, float] = found["step_s"]  # type: ignore[assignment]
    exposed: dict[str, dict[str, float]] = found["exposed_s"]  # type: ignore[assignment]
    print(f"\n{found['strategy']}, {found['dtype']}, units: {found['units']}")
    print(f"  {'':14}{'s a step':>10}{'exposed s':>11}   by kind")
    for name in ("hand-written", "ddp", "shardwise"):
        kinds = ", ".join(f"{kind} {value:.2f}" for kind, value in exposed[name].items() if kind != "all")
        print(f"  {name:14}{step[name]:>10.2f}{exposed[name]['all']:>11.2f}   {kinds}")
    print(
        f"  compute alone {step['compute']:.2f} s, communication {found['communication_s']:.2f} s (plan's bytes / rate)"
    )
    print(f"  losses differ by {found['loss_apart']:.1e}, weights by {found['weights_apart']:.1e}")
    print(f"  hand-written / shardwise: {found['speedup']:.2f}")
    print(f"  shardwise / max(compute, communication): {found['bound']:.2f}")


def run(given: argparse.Namespace) -> None:
    """Start the hosts and print what they found."""
    words = [__file__, "--worker", *sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        save_llama(Path(folder), blocks=8, vocab=VOCAB, length=LENGTH)
        words += ["--folder", folder]
        rate = factor = None
        if given.loopback:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *words]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        else:
            rate = given.mbit_per_s
            lab = stack.enter_context(Lab(hosts=2, mbit_per_s=rate, large_packets=True))
            factor = lab.header_factor()
            lab.torchrun(words, timeout_s=1200)
        found = [summary(result, rate) for result in json.loads(Path(folder, "results.json").read_text())]
    if given.json:
        print(json.dumps({"mbit_per_s": rate, "header_factor": factor, "rounds": given.rounds, "cases": found}))
        return
    link = "two processes on one host" if rate is None else f"{rate:g} Mbit/s between two hosts"
    print(f"6.4 million parameters, {ROWS} x {LENGTH} tokens a rank, {link}; {given.rounds} rounds")
    if factor is not None:
        print(f"header factor of a known transfer: {factor:.3f}")
    for case in found:
        show(case)


def main(words: Sequence[str] | None = None) -> None:
    """Start the hosts, or be a rank on one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mbit-per-s", type=float, default=200.0, help="rate of the link")
    parser.add_argument("--loopback", action="store_true", help="no slow link")
    parser.add_argument("--dtype", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument(
        "--strategy", nargs="+", choices=["FULL_SHARD", "SHARD_GRAD_OP"], default=["FULL_SHARD", "SHARD_GRAD_OP"]
    )
    parser.add_argument("--linear-units", action="store_true", help="every linear layer is a unit")
    parser.add_argument("--prefetch", type=int, help="shardwise's prefetch depth instead of its default")
    parser.add_argument("--buffers", type=int, help="shardwise's reductions in flight instead of its default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if given.worker:
        work(given)
        return
    reason = "" if given.loopback else unavailable()
    if reason:
        raise SystemExit(f"not measured: {reason}")
    run(given)


if __name__ == "__main__":
    main()
