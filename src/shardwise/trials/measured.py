"""Measured rows: what a public source or an own run says of one configuration, one JSON object a line.

The schema is explained field by field in `bench/measurements/README.md`. Every key has to be there, no other may be;
null means not stated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, NoReturn

from pydantic import Field, ValidationError

from shardwise.spec.problems import BadInput, Problem, did_you_mean
from shardwise.spec.runtime import Quantization
from shardwise.spec.strict import PositiveInt, Strict

MeasuredDtype = Literal["fp32", "bf16", "fp16", "fp8"]
Use = Literal["memory", "throughput", "feasibility"]
Statistic = Literal["allocated", "active", "reserved", "nvidia-smi", "unknown"]


class MeasuredModel(Strict):
    """The model's shape, as it was run."""

    name: str
    params_b: float | None = Field(gt=0)
    layers: PositiveInt | None
    hidden: PositiveInt | None
    heads: PositiveInt | None
    kv_heads: PositiveInt | None
    head_dim: PositiveInt | None
    ffn: PositiveInt | None
    vocab: PositiveInt | None
    mlp: Literal["swiglu", "geglu", "gelu", "relu2"] | None
    tied_embeddings: bool | None
    learned_positions: bool | None
    experts: None


class MeasuredCluster(Strict):
    """The machines."""

    gpu: str | None
    num_gpus: PositiveInt | None
    gpus_per_node: PositiveInt | None
    link: Literal["nvlink", "pcie", "unknown"]
    network: str | None


class MeasuredPlan(Strict):
    """How the program was laid out."""

    strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD", "ZERO1", "ZERO2", "ZERO3", "MEGATRON"]
    replicate: PositiveInt | None
    shard: PositiveInt | None
    tensor: PositiveInt | None
    pipeline: PositiveInt | None
    context: PositiveInt | None
    reshard_after_forward: bool | None
    fsdp_version: Literal[1, 2] | None
    storage_dtype: MeasuredDtype | None
    compute_dtype: MeasuredDtype | None
    reduce_dtype: MeasuredDtype | None
    optimizer: Literal[
        "adamw",
        "adam",
        "adamw_8bit",
        "adamw_paged",
        "adamw_paged_8bit",
        "adamw_in_backward",
        "adamw_8bit_in_backward",
        "adamw_paged_in_backward",
        "adamw_paged_8bit_in_backward",
        "unknown",
    ]
    optimizer_state_bytes_per_param: float | None = Field(ge=0)
    activation_checkpointing: Literal["none", "full", "selective_op", "every_2", "unknown"]
    loss: Literal["eager", "fused", "chunked", "unknown"]
    attention: Literal["flash", "sdpa", "eager", "unknown"]
    compile: bool
    offload: Literal["none", "params_optimizer", "activations", "optimizer"]
    seq_len: PositiveInt | None
    micro_batch: PositiveInt | None
    accumulation: PositiveInt | None
    global_batch: PositiveInt | None

    @property
    def mesh_product(self) -> int | None:
        """Ranks of the mesh; None where an axis is not known."""
        product = 1
        for size in (self.replicate, self.shard, self.tensor, self.pipeline, self.context):
            if size is None:
                return None
            product *= size
        return product


class MeasuredLora(Strict):
    """Adapters."""

    rank: PositiveInt | None
    targets: list[str] | Literal["all-linear", "attention", "unknown"]
    base_quantization: Quantization | None
    adapter_dtype: MeasuredDtype | None


class Measured(Strict):
    """What was seen."""

    outcome: Literal["ok", "oom"]
    peak_gib: float | None = Field(gt=0)
    statistic: Statistic | None
    tokens_per_s_per_gpu: float | None = Field(gt=0)
    step_time_s: float | None = Field(gt=0)
    mfu: float | None = Field(gt=0)


class MeasuredRow(Strict):
    """One measurement."""

    id: str = Field(min_length=1)
    source: str
    model: MeasuredModel
    cluster: MeasuredCluster
    plan: MeasuredPlan
    lora: MeasuredLora | None
    measured: Measured
    trust: Literal["high", "medium", "low"]
    use: list[Use]
    headline: list[Literal["memory", "throughput"]]
    assumed: list[str]
    notes: str

    @property
    def family(self) -> str:
        """Prefix of the id, which stands for the source."""
        return self.id.partition("-")[0]


def read_rows(path: Path) -> list[MeasuredRow]:
    """Return the rows of a file, one JSON object a line; empty lines are passed over.

    Raises:
        BadInput: with every line that is not a row of the schema, and why.
        OSError: the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise BadInput(Problem(field=path.name, reason=f"is not UTF-8 text: {error.reason}")) from None
    rows: list[MeasuredRow] = []
    problems: list[Problem] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = read_row(line)
        except BadInput as error:
            problems += [_at(problem, path.name, number) for problem in error.problems]
            continue
        if row.id in seen:
            reason = f"is the id of line {seen[row.id]} already"
            problems.append(Problem(field=f"{path.name}:{number}", value=row.id, reason=reason))
        seen[row.id] = number
        rows.append(row)
    if problems:
        raise BadInput(problems)
    if not rows:
        raise BadInput(Problem(field=path.name, reason="holds no rows", allowed="one JSON object a line"))
    return rows


def read_row(line: str) -> MeasuredRow:
    """Return the row that one line holds.

    Raises:
        BadInput: no JSON, keys that are missing or unknown, values that the schema does not know, a mesh that is not
            the number of GPUs.
    """
    try:
        content = json.loads(line, parse_constant=_no_number)
    except ValueError as error:
        raise BadInput(Problem(field="", reason=f"is not JSON: {error}")) from None
    if not isinstance(content, dict):
        raise BadInput(Problem(field="", value=content, reason="is no row", allowed="a JSON object"))
    try:
        row = MeasuredRow.model_validate(content)
    except ValidationError as error:
        raise BadInput([_problem(one) for one in error.errors()]) from None
    product, gpus = row.plan.mesh_product, row.cluster.num_gpus
    if product is not None and gpus is not None and product != gpus:
        reason = f"the mesh has {product} ranks: replicate x shard x tensor x pipeline x context"
        raise BadInput(Problem(field="cluster.num_gpus", value=gpus, reason=reason))
    return row


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _at(problem: Problem, file: str, number: int) -> Problem:
    """Say on which line of which file."""
    place = f"{file}:{number}" + (f" {problem.field}" if problem.field else "")
    return Problem(field=place, value=problem.value, reason=problem.reason, allowed=problem.allowed, fix=problem.fix)


def _problem(error: Any) -> Problem:
    """Turn one of pydantic's errors into ours."""
    place = [str(part) for part in error["loc"]]
    field = ".".join(place)
    if error["type"] == "missing":
        return Problem(field=field, reason="is missing", fix="null where it is not stated")
    if error["type"] == "extra_forbidden":
        return Problem(field=field, reason="is not a key of a row", fix=did_you_mean(place[-1], _keys(place[:-1])))
    allowed = str(error.get("ctx", {}).get("expected", ""))
    return Problem(field=field, value=error["input"], reason=str(error["msg"]), allowed=allowed)


def _keys(place: list[str]) -> list[str]:
    """Return the keys of the part of a row at `place`."""
    parts: dict[str, type[Strict]] = {
        "model": MeasuredModel,
        "cluster": MeasuredCluster,
        "plan": MeasuredPlan,
        "lora": MeasuredLora,
        "measured": Measured,
    }
    part = parts.get(place[0], MeasuredRow) if place else MeasuredRow
    return list(part.model_fields)
