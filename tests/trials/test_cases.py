"""From a row to what the instruments take: read from its fields alone."""

from __future__ import annotations

import pytest

from house.source import ROOT
from shardwise.trials.cases import Skipped, case_of
from shardwise.trials.measured import MeasuredRow, read_rows
from trials.rows import row, single

LORA = {"rank": 12, "targets": ["q_proj", "v_proj"], "base_quantization": None, "adapter_dtype": "bf16"}


def _case(content):
    return case_of(MeasuredRow.model_validate(content))


def _published():
    return read_rows(ROOT / "bench" / "measurements" / "published.jsonl")


def test_only_what_no_instrument_predicts_is_skipped():
    reasons = set()
    for one in _published():
        try:
            case_of(one)
        except Skipped as error:
            reasons.add(str(error).partition(":")[0])
            assert not one.headline or "memory" not in one.headline
    assert reasons == {"ZERO1", "MEGATRON", "context parallelism", "not stated"}


def test_parameters_are_those_of_the_source():
    for one in _published():
        if "memory" in one.use and one.plan.strategy != "ZERO1":
            found = case_of(one).workload.model.parameters / 1e9
            assert found == pytest.approx(one.model.params_b, rel=0.03), one.id


def test_neither_id_nor_source_nor_notes_matter():
    for one in _published():
        if "memory" in one.use:
            other = one.model_copy(update={"id": "X-1", "source": "x", "notes": "", "trust": "low", "assumed": []})
            try:
                case = case_of(one)
            except Skipped:
                continue
            assert case_of(other) == case


@pytest.mark.parametrize(
    ("content", "sharding"),
    [
        (row(), "fsdp2"),
        (row(plan__fsdp_version=1), "fsdp1"),
        (row(plan__fsdp_version=None, plan__strategy="ZERO3"), "fsdp1"),
        (row(plan__fsdp_version=None, plan__strategy="ZERO2"), "none"),
        (single(), "none"),
    ],
)
def test_the_program_is_found_by_strategy_and_version(content, sharding):
    assert _case(content).runtime.sharding == sharding


def test_adapters_take_the_names_of_the_class_that_stands_in():
    lora = {**LORA, "targets": ["qkv_proj", "o_proj", "down_proj"]}
    fused = _case(single(model__mlp="gelu", lora=lora))
    assert fused.workload.model.model_type == "gpt_neox"
    assert fused.workload.lora.targets == ("query_key_value", "attention.dense", "dense_4h_to_h")
    assert _case(single(lora=LORA)).workload.lora.targets == ("q_proj", "v_proj")


def test_modules_trained_whole_are_no_targets():
    lora = {**LORA, "targets": ["q_proj", "embed_tokens:full", "lm_head:full"]}
    found = _case(single(lora=lora)).workload.lora
    assert (found.targets, found.modules_to_save) == (("q_proj",), ("embed_tokens", "lm_head"))


def test_fp32_adapters_beside_a_16_bit_base_mean_autocast():
    assert not _case(single(lora=LORA)).runtime.autocast
    mixed = _case(single(lora={**LORA, "adapter_dtype": "fp32"}))
    assert mixed.runtime.autocast
    assert (mixed.plan.dtypes.frozen_storage, mixed.plan.dtypes.trained_storage) == ("bf16", "fp32")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"plan__pipeline": 2, "plan__shard": 1}, "pipeline parallelism"),
        ({"plan__context": 2, "plan__shard": 1}, "context parallelism"),
        ({"plan__strategy": "MEGATRON"}, "MEGATRON"),
        ({"plan__seq_len": None, "model__ffn": None}, "not stated: model.ffn, plan.seq_len"),
        ({"plan__storage_dtype": "fp8"}, "fp8"),
        ({"model__kv_heads": 3}, "is not a multiple"),
        ({"lora": {**LORA, "targets": ["gate"]}}, "no module of the stand-in class"),
    ],
)
def test_what_is_skipped_says_why(changes, reason):
    with pytest.raises(Skipped, match=reason):
        _case(row(**changes))
