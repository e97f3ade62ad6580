"""docs/combinations.md, from what the product says and what is run: PYTHONPATH=tests python -m combinations.page"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from combinations.compare import OPTIMIZER, PRECISION, Tolerance
from combinations.features import CORE, FEATURES, GPU_KERNELS, Pair, world_of
from combinations.survey import Survey, survey
from harness.models import tiny_checkpoint
from shardwise.spec.problems import Problem
from shardwise.spec.yaml_text import dump_yaml

TARGET = Path(__file__).parents[2] / "docs" / "combinations.md"

HEAD = """# What works together

Made by `PYTHONPATH=tests python -m combinations.page`; a test holds it up to date.

{features} features make {pairs} pairs of values:

- **{proven} are proven by {rows} live runs**, each compared with one process;
- {gpu} need a kernel that exists on GPUs only, and were not run;
- {refused} are refused before ranks start, as something below makes them impossible;
- {meaningless} are refused because they have no meaning.

The refused are {share:.1%} of all. Between {core}
nothing is refused but what has no meaning.

## Proof

The {rows} runs are a covering array: each has one value of every feature, and every pair that can run on a CPU is in at
least one of them, as is every strategy with every method and precision. Each run is the product's own path, on
{worlds} gloo ranks: settings read as from a file, plan, checks, loading of each rank's slices, read-back of the live
model, and three steps with clipping, of which the first is watched (collectives and dtypes are compared with the plan).
8 rows a step, of 7 that exist, 5 to 23 tokens long, 1 to all but one of them trained; micro-batches of different label
counts, one rank with a row that teaches nothing.

The same three steps are then done in one process: whole batch in one forward, fp32, eager attention, no
checkpointing, the optimizer as torch (or torchao) makes it. Ranks must agree with each other to the bit, and with that
process within:

{tolerances}
Losses and norms are those of each step; gradients, of each weight, those of the last step; movement is what all weights
moved. AdamW's learning rate is 1e-3, so that bf16 can store what it does.

Compiled runs assert that torch compiled something. It compiles nothing of a recomputed block whose linear layers are
units: these three together are refused, and in no run. The 8-bit optimizer's update runs uncompiled. On CPUs offload
runs the code that it runs on GPUs, but its copies go nowhere.

```bash
.venv/bin/python -m pytest tests/combinations -m 'slow or not slow'
```

## Values

{values}
## Pairs

A cell counts the pairs of two features that are proven; `g` those for GPUs only, and numbers in brackets are reasons
below.

{matrix}
## Refused

{reasons}"""

MEANINGLESS = "has no meaning"


def page(surveyed: Survey) -> str:
    """Return the whole page."""
    refused = surveyed.pairs("")
    meaningless = [pair for pair in refused if is_meaningless(pair)]
    return HEAD.format(
        pairs=len(surveyed.verdicts),
        features=len(FEATURES),
        proven=len(surveyed.pairs("cpu")),
        rows=len(surveyed.rows),
        gpu=len(surveyed.pairs("cuda")),
        meaningless=len(meaningless),
        refused=len(refused) - len(meaningless),
        share=len(refused) / len(surveyed.verdicts),
        core=f"{', '.join(CORE[:-1])} and {CORE[-1]}",
        worlds=", ".join(str(world) for world in sorted({world_of(row) for row in surveyed.rows})),
        tolerances=_tolerances(),
        values=_values(),
        matrix="".join(_matrix(surveyed)),
        reasons="".join(_reasons(surveyed)),
    )


def is_meaningless(pair: Pair) -> bool:
    """Tell whether a refused pair asks for nothing: replicas are to be left for last where there are none."""
    return ("accumulation", "defer_replicate") in pair and pair[0][0] == "strategy"


def _tolerances() -> str:
    lines = ["| run | loss | norm | gradients | movement |\n|---|---|---|---|---|\n"]
    for name, bounds in {**PRECISION, **{f"fp32, {name}": bounds for name, bounds in OPTIMIZER.items()}}.items():
        lines.append(f"| {name} | {_bounds(bounds)} |\n")
    return "".join(lines)


def _bounds(bounds: Tolerance) -> str:
    return " | ".join(f"{bound:g}" for bound in (bounds.loss, bounds.norm, bounds.gradient, bounds.moved))


def _values() -> str:
    lines = ["| feature | values |\n|---|---|\n"]
    for feature, values in FEATURES.items():
        shown = "; ".join(f"{_value(feature, value)}{_yaml(settings)}" for value, settings in values.items())
        lines.append(f"| {feature} | {shown} |\n")
    return "".join(lines)


def _value(feature: str, value: str) -> str:
    return f"{value} (GPU)" if GPU_KERNELS.get(feature) == value else value


def _yaml(settings: dict[str, object]) -> str:
    """Return what is written for a value; nothing where it is the default or already says it."""
    return f" `{_flow(settings)[1:-1]}`" if settings else ""


def _flow(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return dump_yaml({"k": value}).removeprefix("k: ").strip()


def _numbered(surveyed: Survey) -> dict[str, int]:
    """Return a number for each reason."""
    told: dict[str, int] = {}
    for pair in surveyed.pairs(""):
        told.setdefault(_reason(surveyed.verdicts[pair].problem), len(told) + 1)
    return told


def _reason(problem: Problem | None) -> str:
    assert problem is not None
    return f"`{problem.field}`: {problem.reason}"


def _matrix(surveyed: Survey) -> Iterator[str]:
    names, numbers = list(FEATURES), _numbered(surveyed)
    yield "| | " + " | ".join(names[1:]) + " |\n" + "|---" * len(names) + "|\n"
    for place, one in enumerate(names[:-1]):
        cells = [_cell(surveyed, one, other, numbers) if names.index(other) > place else "" for other in names[1:]]
        yield f"| {one} | " + " | ".join(cells) + " |\n"


def _cell(surveyed: Survey, one: str, other: str, numbers: dict[str, int]) -> str:
    found = {pair: v for pair, v in surveyed.verdicts.items() if (pair[0][0], pair[1][0]) == (one, other)}
    parts = [str(sum(v.runs_on == "cpu" for v in found.values()))]
    on_gpu = sum(v.runs_on == "cuda" for v in found.values())
    parts += [f"+ {on_gpu}g"] if on_gpu else []
    why = sorted({numbers[_reason(v.problem)] for v in found.values() if v.runs_on == ""})
    return " ".join([*parts, *([f"[{', '.join(map(str, why))}]"] if why else [])])


def _reasons(surveyed: Survey) -> Iterator[str]:
    yield "| | pair | why |\n|---|---|---|\n"
    for reason, number in _numbered(surveyed).items():
        pairs = [pair for pair in surveyed.pairs("") if _reason(surveyed.verdicts[pair].problem) == reason]
        listed = "; ".join(" x ".join(f"{feature} {value}" for feature, value in pair) for pair in pairs)
        why = f"{MEANINGLESS}: {reason}" if all(map(is_meaningless, pairs)) else reason
        yield f"| {number} | {listed} | {why} |\n"


def main() -> None:
    """Write the page."""
    with tempfile.TemporaryDirectory() as folder:
        made: dict[str, Path] = {}

        def tiny(family: str, **options: object) -> Path:
            key = f"{family}-{sorted((name, str(value)) for name, value in options.items())}"
            if key not in made:
                made[key] = tiny_checkpoint(Path(folder) / str(len(made)), family, **options)
            return made[key]

        TARGET.write_text(page(survey(tiny)))


if __name__ == "__main__":
    sys.exit(main())
