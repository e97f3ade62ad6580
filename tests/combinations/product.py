"""What the product says of a pair before any rank starts: it runs here, it needs a GPU, or it is refused."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from combinations.features import FEATURES, GPU_KERNELS, Item, Pair, Row, model_of, settings_of, world_of
from shardwise.engine.check import check_plan
from shardwise.engine.load import build_skeleton, frozen_storage
from shardwise.engine.source import open_source
from shardwise.planner.decide import Facts, decide
from shardwise.spec.job import Job
from shardwise.spec.plan import Plan
from shardwise.spec.problems import BadInput, Problem
from shardwise.spec.reader import read_job_dict

Tiny = Callable[..., Path]
"""The fixture `tiny`."""

_SKELETON = ("method", "precision", "weights", "tensor", "optimizer")
"""Features that the model on the meta device depends on, beside its attention."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What becomes of a pair."""

    runs_on: str
    """`cpu`; `cuda` when one of its kernels exists on GPUs only; "" when it is refused."""
    problem: Problem | None
    """Why it is refused."""


def folder_of(row: Row, tiny: Tiny) -> Path:
    """Return the checkpoint that a row is run on, stored in bf16."""
    return tiny("llama", dtype=torch.bfloat16, **model_of(row))


class Product:
    """The product's checks, with models kept from one question to the next."""

    def __init__(self, tiny: Tiny) -> None:
        self._tiny = tiny
        self._skeleton = cache(self._build)

    def job(self, row: Row) -> Job:
        """Return the job of a row, read as from a file.

        Raises:
            BadInput: settings that contradict each other.
        """
        return read_job_dict(settings_of(row, str(folder_of(row, self._tiny))))

    def plan(self, row: Row, device_type: str = "cpu") -> Plan:
        """Return the plan of a row, checked as before every run.

        On `cuda` the packages of the GPU kernels are taken as installed, and the model is looked at with another
        attention, as these packages are not here.

        Raises:
            BadInput: what the product refuses.
        """
        job = self.job(row)
        shape = {name: row[name] for name in _SKELETON if name in row}
        if device_type == "cpu" and "attention" in row:
            shape["attention"] = row["attention"]
        model, stored = self._skeleton(tuple(shape.items()))
        facts = Facts(
            world=world_of(row), device_type=device_type, parameters=1, frozen_storage=stored, attention="sdpa"
        )
        plan = decide(job, facts)
        with patch.object(importlib.util, "find_spec", _with_kernels):
            check_plan(model, plan, device_type)
        return plan

    def _build(self, shape: tuple[tuple[str, str], ...]) -> tuple[Any, Any]:
        job = self.job(dict(shape))
        source = open_source(job.model)
        return build_skeleton(job, source.config, source.dtype, source).model, frozen_storage(job, source.dtype)

    def refusal(self, row: Row, device_type: str) -> Problem | None:
        """Return why a row is refused on a device, or None."""
        try:
            self.plan(row, device_type)
        except BadInput as bad:
            return bad.problems[0]
        return None

    def verdict(self, pair: Pair) -> Verdict:
        """Return what becomes of a pair, which may stand with any strategy and says nothing of other features."""
        device_type = "cuda" if any(GPU_KERNELS.get(feature) == value for feature, value in pair) else "cpu"
        row = dict(pair)
        strategies = [row["strategy"]] if "strategy" in row else list(FEATURES["strategy"])
        refusals = {name: self.refusal({**row, "strategy": name}, device_type) for name in strategies}
        if None in refusals.values():
            return Verdict(runs_on=device_type, problem=None)
        return Verdict(runs_on="", problem=refusals[self._telling(pair, strategies, device_type)])

    def _telling(self, pair: Pair, strategies: list[str], device_type: str) -> str:
        """Return the strategy whose refusal says most of a pair: one that takes each of the two, else the first one."""

        def takes(strategy: str, item: Item) -> bool:
            return self.refusal({item[0]: item[1], "strategy": strategy}, device_type) is None

        both = (name for name in strategies if all(takes(name, item) for item in pair))
        first = (name for name in strategies if takes(name, pair[0]))
        return next(both, None) or next(first, strategies[0])


_find_spec = importlib.util.find_spec


def _with_kernels(name: str, package: str | None = None) -> Any:
    return object() if name == "liger_kernel" else _find_spec(name, package)
