"""Peaks of published runs as shardwise and others predict them, side by side: python bench/memory_peers.py [FILE]

The others are rules that people use; each is computed here from its published formula:

- 16 bytes per parameter: fp32 master, gradients and Adam's two moments (or the same sum in mixed precision), over the
  GPUs that share them (Rajbhandari et al. 2019, ZeRO, section 3.1);
- DeepSpeed's estimate of ZeRO-3 model states: 4 bytes x the largest layer + 18 bytes x parameters / GPUs (its
  documentation, "Memory Requirements"); model states only;
- accelerate's `estimate-memory`, training with Adam: the largest of model, gradients and optimizer step; in fp32 four
  times the weights, in mixed precision twice the fp32 weights (its documentation, "Model memory estimator"); one GPU.

None of them knows adapters, lengths or losses. A row counts where its peak is good for comparing and shardwise predicts
it; `reserved` and others come with what the allocator holds on top, for shardwise alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from shardwise.predict.constants import GIB
from shardwise.spec.strict import DTYPE_BYTES
from shardwise.trials.figures import TENSORS, percentile
from shardwise.trials.measured import read_rows
from shardwise.trials.validate import Predicted, RowCheck, check_rows

SHARED = Path(__file__).with_name("measurements") / "published.jsonl"

NAMES = ("shardwise", "16 bytes", "DeepSpeed", "accelerate")


def sixteen_bytes(predicted: Predicted) -> float:
    """Return 16 bytes per parameter over the ranks that share them, in bytes."""
    plan = predicted.case.plan
    return 16 * predicted.case.workload.model.parameters / (plan.mesh.shard * plan.mesh.tensor)


def deepspeed(predicted: Predicted) -> float:
    """Return DeepSpeed's ZeRO-3 model states per GPU, in bytes; its largest layer is the largest single module."""
    model, mesh = predicted.case.workload.model, predicted.case.plan.mesh
    tensors = [tensor.elements for kind in model.kinds for tensor in kind.tensors]
    largest = max([*tensors, *(tensor.elements for tensor in model.outside)])
    return 4 * largest + 18 * model.parameters / (mesh.shard * mesh.tensor)


def accelerate(predicted: Predicted) -> float:
    """Return accelerate's figure for training with Adam, in bytes."""
    plan, parameters = predicted.case.plan, predicted.case.workload.model.parameters
    return parameters * (16 if DTYPE_BYTES[plan.dtypes.param] == 4 else 8)


def figures(check: RowCheck) -> dict[str, float]:
    """Return every rule's relative error on a row."""
    memory, predicted = check.memory, check.predicted
    assert memory is not None
    assert predicted is not None
    sizes = {
        "shardwise": memory.predicted * GIB,
        "16 bytes": sixteen_bytes(predicted),
        "DeepSpeed": deepspeed(predicted),
        "accelerate": accelerate(predicted),
    }
    return {name: size / GIB / memory.measured - 1 for name, size in sizes.items()}


def main() -> None:
    """Print one line per row, and the medians."""
    parser = argparse.ArgumentParser(description="Peaks of published runs as several rules predict them.")
    parser.add_argument("file", type=Path, nargs="?", default=SHARED)
    checks = [check for check in check_rows(read_rows(parser.parse_args().file)) if check.memory is not None]
    print(f"{'row':10} {'GiB':>7} {'statistic':>10}  " + "".join(f"{name:>12}" for name in NAMES))
    for check in checks:
        memory = check.memory
        assert memory is not None
        errors = "".join(f"{error:+12.1%}" for error in figures(check).values())
        print(f"{check.row.id:10} {memory.measured:7.2f} {memory.statistic:>10}  {errors}")
    print()
    print(f"{'median of absolute errors':30}" + "".join(f"{name:>12}" for name in NAMES))
    groups = {
        "allocated or active": [c for c in checks if c.row.measured.statistic in TENSORS],
        "reserved and others": [c for c in checks if c.row.measured.statistic not in TENSORS],
        "all": checks,
    }
    for title, rows in groups.items():
        if rows:
            found = [figures(check) for check in rows]
            medians = (percentile([abs(error[name]) for error in found], 0.5) for name in NAMES)
            print(f"{f'{title} ({len(rows)} rows)':30}" + "".join(f"{median:12.1%}" for median in medians))


if __name__ == "__main__":
    main()
