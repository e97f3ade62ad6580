"""Blocks on one rank of a tensor axis by formula, against the real layout of a model on a group that sends nothing."""

from __future__ import annotations

from typing import Any

import pytest

from predict.block_cases import FAMILIES, LENGTH, ROWS, levels, plan, workload
from predict.blocks_truth import build_split, measure
from predict.test_blocks import LORA, assert_levels
from shardwise.engine.compat_fake import fake_group
from shardwise.predict.blocks import computation
from shardwise.spec.layout import Mesh
from shardwise.spec.method import Lora
from shardwise.spec.runtime import Runtime

EVEN_VOCAB = 332
"""A vocabulary that two ranks can share; the small models' own they cannot."""


def assert_right(config: dict[str, Any], lora: Lora | None, *, sequence: bool = False, **changes: Any) -> None:
    """Compare every part of a step."""
    chosen = plan(mesh=Mesh(tensor=2, sequence_parallel=sequence), **changes)
    with fake_group(chosen.mesh.world):
        real = measure(build_split(config, chosen, lora), ROWS, LENGTH, config["vocab_size"])
    found = levels(workload(config, lora), chosen)
    del real["embedding"]
    assert_levels(real, found)


@pytest.mark.parametrize("sequence", [False, True], ids=["whole sequences", "parts of sequences"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_split_blocks(family: str, sequence: bool):
    assert_right({**FAMILIES[family], "vocab_size": EVEN_VOCAB}, None, sequence=sequence)


@pytest.mark.parametrize("changes", [{}, {"activation_checkpointing": "full"}, {"param": "fp32"}], ids=str)
def test_split_adapters(changes: dict[str, Any]):
    assert_right(FAMILIES["llama"], LORA, **changes)


def test_gathered_columns():
    """Phi-3's fused projections are split where they are multiplied, and whole in between."""
    assert_right(FAMILIES["phi3"], None, activation_checkpointing="selective")


def test_ranks_divide_what_a_block_holds():
    work = workload({**FAMILIES["llama"], "num_key_value_heads": 6})
    whole = computation(work, Runtime(), "cuda").block(plan(), 0, checkpointing="none")
    split = computation(work, Runtime(), "cuda").block(plan(mesh=Mesh(tensor=2)), 0, checkpointing="none")
    sequence = Mesh(tensor=2, sequence_parallel=True)
    parts = computation(work, Runtime(), "cuda").block(plan(mesh=sequence), 0, checkpointing="none")
    assert whole.kept > split.kept > parts.kept
    assert parts.output == whole.output // 2
    unit = whole.output
    assert split.kept > whole.kept // 2 + 3 * unit  # norms work on whole hidden states


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_first_block_is_evaluated_on_whole_sequences(attention: str):
    """It is given all of the sequence and takes its part, in evaluation as in training: no less than a later block
    holds, which is given a part."""
    mesh = Mesh(tensor=2, sequence_parallel=True)
    computed = computation(workload({**FAMILIES["llama"], "num_key_value_heads": 6}), Runtime(), "cuda")
    chosen = plan(mesh=mesh, attention=attention)
    first, later = (computed.block(chosen, 0, checkpointing="none", first=one).evaluation for one in (True, False))
    assert first.total >= later.total
