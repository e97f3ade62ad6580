"""The check of exports in a fresh process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.ranks import run_ranks
from shardwise.engine.source import open_source
from shardwise.spec.job import ModelChoice
from shardwise.state import verify as verifying
from shardwise.state.export import Exported, export_adapter, export_merged
from shardwise.state.probe import generate_answer, probe_logits
from shardwise.state.verify import VerificationError, tolerance_for, verify, verify_export

from .sharded import adamw, build, step

IDS = torch.randint(5, 100, (2, 9), generator=torch.Generator().manual_seed(3))


def exports(source: Path, folder: Path, **options) -> tuple[Exported, Exported, torch.Tensor]:
    """Train a step on two ranks and export; return (adapter, merged model, live logits)."""

    def body(rank, world):
        model = build(source, lora=True, **options)
        step(model, adamw(model), 0, rank, world)
        opened = open_source(ModelChoice(path=str(source)))
        tokenizer = opened.tokenizer()
        adapter = export_adapter(folder / "adapter", model, source=opened, tokenizer=tokenizer)
        merged = export_merged(folder / "merged", model, source=opened, tokenizer=tokenizer)
        return adapter, merged, probe_logits(model, IDS)

    return run_ranks(body, 2)[0]


def expectation(path: Path, exported: Exported, logits: torch.Tensor, computed="fp32", base_dtype="") -> Path:
    """Write what `verify_export` writes for the fresh process."""
    metadata = {
        "tolerance": str(tolerance_for(exported, computed, logits)),
        "computed": computed,
        "base_dtype": base_dtype,
    }
    save_file({"input_ids": IDS, "logits": logits}, path, metadata)
    return path


@pytest.fixture(scope="module")
def exported(tiny, tmp_path_factory):
    """Source, adapter, merged model and live logits in fp32."""
    source = tiny("llama", layers=2)
    return source, *exports(source, tmp_path_factory.mktemp("exports"))


def assert_sound(exported: Exported, expect: Path, source: Path) -> None:
    found = verify(exported.path, expect, source, "what is the name")
    assert found.ok, found.reason
    assert found.max_difference <= found.tolerance
    assert found.greedy_agreement > 0.8
    assert found.answer_before != found.answer_after


def test_sound_exports_pass(exported, tmp_path):
    source, adapter, merged, live = exported
    for one in (adapter, merged):
        expect = expectation(tmp_path / "expect", one, live)
        assert_sound(one, expect, source)
        without = verify(one.path, expect, source, None)
        assert without.max_difference < 1e-5
        assert without.answer_before is without.answer_after is None


def test_sound_exports_pass_in_bf16(tiny, tmp_path):
    source = tiny("llama", layers=2, dtype=torch.bfloat16)
    adapter, merged, live = exports(source, tmp_path, dtype=torch.bfloat16)
    for one in (adapter, merged):
        assert_sound(one, expectation(tmp_path / "expect", one, live, "bf16"), source)


def test_damage_is_found(exported, tmp_path):
    source, adapter, merged, live = exported
    expect = expectation(tmp_path / "expect", merged, live)
    stored = load_file(merged.path / "model.safetensors")

    def with_weights(export: Exported, tensors) -> str:
        name = "adapter_model.safetensors" if export is adapter else "model.safetensors"
        before = (export.path / name).read_bytes()
        save_file(tensors, export.path / name, {"format": "pt"})
        found = verify(export.path, expect, source, None)
        (export.path / name).write_bytes(before)
        assert not found.ok
        return found.reason

    name = "model.layers.1.self_attn.v_proj.weight"
    assert "logits differ by up to" in with_weights(merged, {**stored, name: stored[name] * 1.1})
    lost = {key: value for key, value in stored.items() if key != name}
    assert with_weights(merged, lost) == f"missing_keys: {name}"
    assert "unexpected_keys: odd" in with_weights(merged, {**stored, "odd": torch.ones(1)})

    low_rank = load_file(adapter.path / "adapter_model.safetensors")
    half = next(key for key in low_rank if "lora_B" in key)
    assert "logits differ" in with_weights(adapter, {**low_rank, half: torch.zeros_like(low_rank[half])})
    lost = {key: value for key, value in low_rank.items() if key != half}
    assert f"PEFT did not load or did not find: {half}" in with_weights(adapter, lost)
    prefixed = {key.replace("model.layers", "_orig_mod.model.layers"): value for key, value in low_rank.items()}
    assert "PEFT did not load or did not find" in with_weights(adapter, prefixed)

    with pytest.raises(ValueError, match="needs --base"):
        verify(adapter.path, expect, None, None)
    shorter = expectation(tmp_path / "shorter", merged, live[:, :-1].contiguous())
    assert "instead of [2, 8, 101]" in verify(merged.path, shorter, None, None).reason


def test_command_line_exit_codes(exported, tmp_path, capsys):
    _, _, merged, live = exported
    good = expectation(tmp_path / "good", merged, live)
    bad = expectation(tmp_path / "bad", merged, live + 1)
    assert verifying.main([str(merged.path), "--expect", str(good)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["ok"] is True
    assert printed.keys() == verifying.Verification.__dataclass_fields__.keys()
    assert verifying.main([str(merged.path), "--expect", str(bad)]) == 1
    with pytest.raises(SystemExit, match="2"):
        verifying.main([str(merged.path)])


def test_tolerance_is_of_the_coarsest_dtype(tmp_path):
    def exported(dtype):
        return Exported(path=tmp_path, tensors=1, bytes=1, source_bytes=1, dtype=dtype, notes=())

    small, large = torch.tensor([0.5]), torch.tensor([-20.0])
    assert tolerance_for(exported(torch.float32), "fp32", small) == 1e-4
    assert tolerance_for(exported(torch.float32), "fp32", large) == 2e-3
    assert tolerance_for(exported(torch.bfloat16), "fp32", small) == 2.5e-2
    assert tolerance_for(exported(torch.float16), "fp32", large) == 0.2
    assert tolerance_for(exported(torch.float32), "bf16", large) == 1.0
    (tmp_path / "adapter_config.json").write_text('{"modules_to_save": null}')
    assert tolerance_for(exported(torch.bfloat16), "fp32", small) == 1e-4
    assert tolerance_for(exported(torch.float32), "fp32", small, "bf16") == 1e-4
    (tmp_path / "adapter_config.json").write_text('{"modules_to_save": ["lm_head"]}')
    assert tolerance_for(exported(torch.float32), "fp32", small, "bf16") == 2.5e-2, "PEFT rounds the head to the base's"
    assert tolerance_for(exported(torch.float32), "fp32", small, "fp32") == 1e-4


def test_fresh_process_environment(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    env = verifying._environment(None)
    assert "RANK" not in env
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert "OMP_NUM_THREADS" not in verifying._environment(None)
    assert verifying._environment(5)["OMP_NUM_THREADS"] == "5"


def test_probe_leaves_the_model_as_it_was(tiny):
    source = tiny("llama", layers=2)

    def body(rank, world):
        model = build(source, lora=True, dropout=0.5, reshard=False)
        optimizer = adamw(model)
        step(model, optimizer, 0, rank, world)
        before = {id(p) for p in model.parameters()}
        first, second = probe_logits(model, IDS), probe_logits(model, IDS)
        assert torch.equal(first, second), "no dropout"
        assert model.training
        assert {id(p) for p in model.parameters()} == before, "shards again"
        with model.disable_adapter():
            base = probe_logits(model, IDS)
        step(model, optimizer, 1, rank, world)
        return first, base, generate_answer(model, AutoTokenizer.from_pretrained(source), "the name", 8)

    (first, base, answer), (other, _, same) = run_ranks(body, 2)
    assert torch.equal(first, other)
    assert answer == same
    plain = AutoModelForCausalLM.from_pretrained(source)
    assert (probe_logits(plain, IDS) - base).abs().max() < 1e-5


def test_answers_are_greedy_and_equal_sharded_or_not(tiny):
    source = tiny("llama", layers=2)
    tokenizer = AutoTokenizer.from_pretrained(source)
    question = "the name of the thing"

    def body(rank, world):
        return generate_answer(build(source), tokenizer, question, 12)

    model = AutoModelForCausalLM.from_pretrained(source)
    expected = generate_answer(model, tokenizer, question, 12)
    assert run_ranks(body, 2) == [expected, expected]
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.do_sample = True
    assert generate_answer(model, tokenizer, question, 12) == expected
    tokenizer.chat_template = None
    assert generate_answer(model, tokenizer, question, 12) != expected


def test_answer_stops_at_the_end_token(tiny):
    source = tiny("llama", layers=2)
    tokenizer = AutoTokenizer.from_pretrained(source)

    def body(rank, world):
        model = build(source)
        letter = tokenizer.convert_tokens_to_ids("a")
        first = probe_logits(model, torch.tensor([[letter]]))[0, -1].argmax().item()
        tokenizer.chat_template = None
        model.generation_config.eos_token_id = [first]
        return generate_answer(model, tokenizer, "a", 12), tokenizer.decode([first], skip_special_tokens=True).strip()

    assert all(answer == first for answer, first in run_ranks(body, 1))


def test_crash_of_the_fresh_process_is_an_error_on_all_ranks(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(verifying.sys, "executable", "/bin/false")

    def body(rank, world):
        exported = Exported(path=tmp_path, tensors=1, bytes=1, source_bytes=1, dtype=torch.float32, notes=())
        with pytest.raises(VerificationError, match="fresh process ended with exit code 1"):
            verify_export(exported, input_ids=IDS, logits=torch.zeros(2, 9, 101), computed="fp32")

    run_ranks(body, 2)


@pytest.mark.slow
def test_fresh_process(tiny, tmp_path):
    source = tiny("qwen2", layers=2, tied=True)
    adapter, merged, live = exports(source, tmp_path, wrapped=True)

    def body(rank, world):
        options = {"input_ids": IDS, "logits": live, "computed": "fp32", "base": source, "question": "the name"}
        found = [verify_export(exported, **options) for exported in (adapter, merged)]
        wrong = verify_export(merged, **{**options, "logits": live + 1.0, "question": None})
        dist.barrier()
        return found, wrong, os.environ["RANK"]

    results = run_ranks(body, 2, timeout=180)
    found, wrong, _ = results[0]
    assert results[1][:2] == (found, wrong)
    assert all(one.ok and one.max_difference < 1e-5 for one in found)
    assert found[0].answer_before == found[1].answer_before
    assert found[0].answer_after == found[1].answer_after
    assert not wrong.ok
    assert "logits differ by up to 1" in wrong.reason
