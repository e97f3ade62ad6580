"""Problems are one line each, and survive a trip between ranks."""

from __future__ import annotations

import pickle

from shardwise.spec.problems import BadInput, Problem, did_you_mean


def test_a_problem_names_place_value_reason_allowed_and_fix():
    problem = Problem(field="fsdp", value="full", reason="is unknown", allowed="a, b", fix="did you mean 'a'?", line=3)
    assert str(problem) == "line 3: fsdp: 'full': is unknown; allowed: a, b; did you mean 'a'?"


def test_bad_input_keeps_its_problems_when_pickled():
    error = BadInput([Problem(field="a", value=1, reason="is wrong"), Problem(field="b", reason="is missing")])
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is BadInput
    assert copied.problems == error.problems


def test_the_nearest_name_is_suggested_whatever_the_case():
    assert did_you_mean("Full_Shrad", ["full_shard", "no_shard"]) == "did you mean 'full_shard'?"
    assert did_you_mean("zzz", ["full_shard"]) == ""
