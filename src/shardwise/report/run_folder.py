"""The folder of one run: what was asked, what was decided, what happened."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import yaml

from shardwise.spec.collectives import Collectives
from shardwise.spec.job import Job
from shardwise.spec.ledger import DtypeLedger
from shardwise.spec.plan import Plan
from shardwise.spec.problems import BadInput, Problem
from shardwise.spec.strict import Strict
from shardwise.spec.units import UnitTable

State = Literal["prepared", "running", "stopped", "finished", "unverified", "failed"]

MAY_CHANGE = (
    *("resume", "log", "checkpoint", "sample", "output"),
    "data",  # its rows are compared
    # another layout of the same training
    *("cluster", "fsdp", "mesh", "units", "prefetch", "reduce_scatter", "micro_batch", "accumulation"),
    *("activation_checkpointing", "offload", "loss_head", "loss_chunk", "compile", "optimizer_implementation"),
    "self_checks",
)
"""Fields in which a resumed job may differ from the run that it continues."""


Backend = Literal["gloo", "cpu:gloo,cuda:nccl"]
"""What a process group is initialised with."""


class RunInfo(Strict):
    """What the ranks of a run need besides job and plan."""

    name: str
    """Name of the configuration, for people."""
    device_type: Literal["cpu", "cuda"]
    """Kind of device of every rank."""
    backend: Backend
    """Communication library."""
    world: int
    """Number of ranks."""
    total_steps: int
    """Optimizer steps of the whole run."""
    data_digest: str
    """Hash of the tokenised rows."""
    model_digest: str
    """Hash of samples of the base model's weight files."""
    resume_from: str | None = None
    """Checkpoint folder that this start continues from."""
    resume_command: str
    """What a person types to continue a stopped run."""


class RunFolder:
    """Paths and small files of a run. Nothing here imports torch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.plan = path / "plan.yaml"
        self.units = path / "units.json"
        self.first_step = path / "first_step.json"
        self.info = path / "run.json"
        self.versions = path / "versions.json"
        self.status = path / "status.json"
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.data = path / "data"
        self.checkpoints = path / "checkpoints"
        self.export = path / "export"
        self.errors = path / "errors"

    def write(self, job: Job, plan: Plan, units: UnitTable, info: RunInfo, *, step: int) -> None:
        """Write everything that is known before the first step of this start (`step` are done); makes the folder."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.versions, json.dumps(versions(), indent=1))
        write_text(self.config, _yaml(job.model_dump(mode="json")))
        write_text(self.plan, plan_text(plan))
        write_text(self.units, units.model_dump_json(indent=1))
        write_text(self.info, info.model_dump_json(indent=1))
        self.set_status("prepared", step)

    def set_status(self, state: State, step: int, message: str = "") -> None:
        """Record where the run stands; read by `shardwise` after the ranks have ended."""
        write_text(self.status, json.dumps({"state": state, "step": step, "message": message, "time": time.time()}))

    def read_status(self) -> dict[str, Any]:
        """Return the last recorded state, `{"state": "prepared", ...}` when none is readable."""
        try:
            status: dict[str, Any] = json.loads(self.status.read_text())
        except (OSError, ValueError):
            return {"state": "prepared", "step": 0, "message": ""}
        return status

    def read_job(self) -> Job:
        """Return the resolved job.

        Raises:
            BadInput: the file is damaged, or of another version.
        """
        try:
            return Job.model_validate(yaml.safe_load(self.config.read_text()))
        except (OSError, ValueError, yaml.YAMLError) as error:
            reason = "is not the configuration of a run, or is damaged, or was written by another version"
            raise BadInput(Problem(field=str(self.config), reason=reason, fix="choose another folder")) from error

    def read_plan(self) -> Plan:
        """Return the plan."""
        stored = yaml.safe_load(self.plan.read_text())
        stored.pop("fingerprint", None)
        return Plan.model_validate(stored)

    def read_units(self) -> UnitTable:
        """Return the communication units."""
        return UnitTable.model_validate_json(self.units.read_text())

    def write_first_step(self, collectives: Collectives, dtypes: DtypeLedger) -> None:
        """Record what the first step of a start did: its collectives, and the dtype of every role."""
        found = {"collectives": collectives.model_dump(mode="json"), "dtypes": dtypes.model_dump(mode="json")}
        write_text(self.first_step, json.dumps(found, indent=1))

    def read_info(self) -> RunInfo:
        """Return the run's facts."""
        return RunInfo.model_validate_json(self.info.read_text())


def write_text(path: Path, text: str) -> None:
    """Write a small file so that it is either the old or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def plan_text(plan: Plan) -> str:
    """Return a plan with its fingerprint as YAML."""
    return _yaml({**plan.model_dump(mode="json"), "fingerprint": plan.fingerprint()})


def _yaml(value: object) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)


def versions() -> dict[str, str]:
    """Return the versions of Python, of the platform and of the packages that decide what a run computes."""
    from platform import platform, python_version

    packages = ("shardwise", "torch", "transformers", "peft", "safetensors", "tokenizers", "pyarrow")
    return {"python": python_version(), "platform": platform(), **{name: metadata.version(name) for name in packages}}


def choose_folder(job: Job, name: str) -> RunFolder:
    """Return the folder that a job will run in, without making it.

    A job without `output` gets `runs/<name>`, numbered when that is taken, or, when it resumes, the newest of these.

    Raises:
        BadInput: the folder named by `output` holds another run or other files, or holds this run and the job does not
            say that it resumes.
    """
    if job.output is None:
        return _numbered(Path("runs"), name, resume=job.resume == "auto")
    path = Path(job.output).expanduser()
    if path.exists() and not path.is_dir():
        raise BadInput(Problem(field="output", value=job.output, reason="is a file, not a folder"))
    _check_writable(path)
    return RunFolder(path)


def _check_writable(path: Path) -> None:
    parent = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise BadInput(Problem(field="output", value=str(path), reason=f"cannot be made: {parent} is not writable"))


def _numbered(parent: Path, name: str, *, resume: bool) -> RunFolder:
    numbers = [1] if (parent / name).exists() else []
    for path in parent.glob(f"{name}-*"):
        suffix = path.name.removeprefix(f"{name}-")
        if suffix.isdecimal():
            numbers.append(int(suffix))
    newest = max(numbers, default=0)
    number = newest if resume and newest else newest + 1
    return RunFolder(parent / (name if number == 1 else f"{name}-{number}"))


def check_same_run(folder: RunFolder, job: Job, info: RunInfo) -> None:
    """Refuse a folder that holds something else than the beginning of this very job.

    Args:
        folder: Where the job is to run.
        job: The resolved job.
        info: What is known of this start.

    Raises:
        BadInput: with the differing fields or inputs, or with the way to resume.
    """
    if not folder.path.is_dir() or not any(folder.path.iterdir()):
        return
    where = str(folder.path)
    if not folder.config.is_file():
        fix = "choose an empty or new folder"
        raise BadInput(Problem(field="output", value=where, reason="holds files that are not a run", fix=fix))
    differences = [*_differences(folder.read_job(), job), *_changed_inputs(folder, info)]
    if differences:
        reason = "holds another run: " + "; ".join(differences[:4])
        fix = "choose another folder, or undo the change"
        raise BadInput(Problem(field="output", value=where, reason=reason, fix=fix))
    untouched = folder.read_status()["state"] == "prepared" and not folder.checkpoints.exists()
    if job.resume == "never" and not untouched:
        status = folder.read_status()
        reason = f"already holds this run ({status['state']} at step {status['step']})"
        raise BadInput(
            Problem(field="output", value=where, reason=reason, fix="continue it with --resume auto, or choose another")
        )


def check_continues(checkpoint: Path, job: Job, info: RunInfo) -> str:
    """Refuse to continue a checkpoint of another run's training; returns a note when that cannot be told.

    Raises:
        BadInput: with the differing fields or inputs.
    """
    origin = RunFolder(checkpoint.parent.parent)
    if not origin.config.is_file():
        return f"note: {checkpoint} is not in a run folder, so its settings, data and model could not be compared"
    differences = [*_differences(origin.read_job(), job), *_changed_inputs(origin, info)]
    if differences:
        reason = "belongs to another training: " + "; ".join(differences[:4])
        raise BadInput(Problem(field="resume", value=str(checkpoint), reason=reason, fix="undo the change"))
    return ""


def _changed_inputs(folder: RunFolder, info: RunInfo) -> Iterable[str]:
    try:
        before = folder.read_info()
    except (OSError, ValueError):
        return
    if before.data_digest != info.data_digest:
        yield "the rows are no longer the same (data, tokenizer or chat template)"
    if before.model_digest != info.model_digest:
        yield "the base model's weights are no longer the same"


def _differences(old: Job, new: Job) -> Iterable[str]:
    moved: Any = {"model": {"path"}}  # its weights are compared
    before, after = old.model_dump(mode="json", exclude=moved), new.model_dump(mode="json", exclude=moved)
    for key in before:
        if key not in MAY_CHANGE and before[key] != after[key]:
            yield f"{key} was {before[key]!r}, now {after[key]!r}"
