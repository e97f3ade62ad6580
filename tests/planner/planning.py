"""Jobs and facts for the planner's tests."""

from __future__ import annotations

import pytest

from shardwise.planner.decide import Facts, decide
from shardwise.spec.job import Job
from shardwise.spec.problems import BadInput, Problem


def job(**fields) -> Job:
    return Job.model_validate({"model": {"path": "m"}, "data": {"path": "d.jsonl"}, **fields})


def facts(**fields) -> Facts:
    given = {
        "world": 8,
        "device_type": "cuda",
        "parameters": 7_000_000_000,
        "frozen_storage": None,
        "attention": "sdpa",
    }
    return Facts(**{**given, **fields})


def refusal(wanted: Job, known: Facts) -> Problem:
    with pytest.raises(BadInput) as caught:
        decide(wanted, known)
    (problem,) = caught.value.problems
    assert problem.fix
    return problem
