"""The estimate against the trace, term by term."""

from __future__ import annotations

from statistics import median

import pytest

from predict.estimate_grid import (
    A10,
    A100,
    CHUNKED,
    CPU,
    FULL,
    H100,
    KEEP,
    LORA,
    Case,
    all_cases,
    case,
    compare,
    hybrid,
    replicas,
    table,
)
from shardwise.spec.layout import Mesh, Offload, Units

SHALLOW = {"num_hidden_layers": 3}
"""Models so short that every block is traced."""

EXACT, OF_A_TERM = 0.005, 0.01
"""What a peak may be off, and a category at the peak, both relative to the peak."""


def shallow() -> list[Case]:
    """Return one configuration for each thing that only few others have in common."""
    gpt2 = {"n_layer": 3}
    return [
        case("full shard", "llama", A100, config=SHALLOW, seq_len=517),
        case("kept", "llama-mha", A100, config=SHALLOW, seq_len=259, **KEEP, **FULL),
        case("int", "llama-mha", H100, config=SHALLOW, seq_len=131, reshard_after_forward=4, **FULL, **CHUNKED),
        case("hybrid", "qwen2", H100, config=SHALLOW, seq_len=131, **hybrid(2, 8), **FULL, **CHUNKED),
        case("replicas", "gpt2", A100, config=gpt2, seq_len=263, **replicas(8)),
        case(
            "deferred",
            "llama",
            A100,
            config=SHALLOW,
            seq_len=263,
            accumulation_steps=3,
            accumulation_mode="defer_all",
            **FULL,
            **CHUNKED,
        ),
        case("own ends", "qwen2", A100, config=SHALLOW, units=Units(embedding="own", head="own"), **FULL, **CHUNKED),
        case("lora", "mistral", A10, config=SHALLOW, seq_len=521, lora=LORA, **CHUNKED),
        case(
            "lora, offload",
            "mistral",
            A10,
            config=SHALLOW,
            seq_len=521,
            lora=LORA,
            offload=Offload(parameters=True, optimizer=True),
            activation_checkpointing="every_2",
        ),
        case("tensor", "llama-mha", A100, config=SHALLOW, seq_len=512, mesh=Mesh(shard=4, tensor=2), **FULL),
        case("selective", "gemma", A100, config=SHALLOW, seq_len=521, activation_checkpointing="selective"),
        case("cpu", "llama-mha", CPU, config=SHALLOW, seq_len=67, accumulation_steps=2),
    ]


@pytest.mark.parametrize("one", shallow(), ids=lambda one: one.name)
def test_estimate_equals_trace(one: Case):
    found = compare(one)
    assert abs(found.total) < EXACT, table([found])
    assert {phase: value for phase, value in found.phases.items() if abs(value) >= OF_A_TERM} == {}, table([found])
    assert {name: value for name, value in found.terms.items() if abs(value) >= OF_A_TERM} == {}, table([found])


@pytest.mark.slow
def test_estimate_is_right_over_many_configurations():
    differences = [compare(one) for one in all_cases()]
    print(table(differences))
    totals = [abs(found.total) for found in differences]
    terms = [abs(value) for found in differences for value in found.terms.values()]
    assert len(totals) >= 60
    assert median(totals) <= 0.001, table(differences)
    assert max(totals) <= EXACT, table(differences)
    assert max(terms) <= 0.05, table(differences)
