"""What no plan can be, told without a model: once, with the field and a remedy."""

from __future__ import annotations

import pytest

from planner.planning import facts, job
from shardwise.planner.decide import decide
from shardwise.spec.plan_rules import broken_rules


@pytest.mark.parametrize(
    ("settings", "device", "field"),
    [
        ({"model": {"path": "m", "attention": "flash_attention_2"}}, "cuda", "model.attention"),
        ({"loss_head": "chunked", "mixed_precision": {"output_dtype": "bf16"}}, "cuda", "mixed_precision.output_dtype"),
        ({"loss_head": "fused"}, "cpu", "loss_head"),
        ({"loss_head": "fused", "mesh": {"tensor": 2}}, "cuda", "loss_head"),
        ({"compile": True, "mesh": {"tensor": 2}}, "cuda", "compile"),
        ({"optimizer": "adamw_8bit", "offload": {"optimizer": True}}, "cuda", "offload.optimizer"),
        ({"optimizer": "adamw_8bit", "optimizer_state_dtype": "bf16"}, "cuda", "optimizer_state_dtype"),
    ],
)
def test_a_broken_rule_names_the_field_and_says_what_to_do(settings, device, field):
    plan = decide(job(**settings), facts(device_type=device))
    (problem,) = broken_rules(plan, device)
    assert problem.field == field
    assert problem.fix or problem.allowed


def test_a_plain_plan_breaks_none():
    for device in ("cpu", "cuda"):
        assert not list(broken_rules(decide(job(), facts(device_type=device)), device))
