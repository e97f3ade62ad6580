"""Exports, opened again by transformers and PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from engine.training import make_job, make_plan
from harness.ranks import run_ranks
from shardwise.engine.dtypes import DTYPE_NAME
from shardwise.engine.load import load_model
from shardwise.engine.mesh import build_mesh
from shardwise.engine.source import open_source
from shardwise.spec.job import ModelChoice
from shardwise.state import export, merge
from shardwise.state.export import ExportError, export_adapter, export_merged
from shardwise.state.probe import probe_logits
from shardwise.state.verify import tolerance_for, verify

from .sharded import adamw, build, step

IDS = torch.randint(5, 100, (2, 9), generator=torch.Generator().manual_seed(3))
CASES = [
    ("llama", False, {"wrapped": True}),
    ("llama", True, {}),
    ("qwen2", False, {"reshard": False}),
    ("qwen2", True, {"wrapped": True, "replicate": True}),
]


def source_of(folder: Path):
    return open_source(ModelChoice(path=str(folder)))


def keys(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of all tensors in a folder."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return found


def trained(source, rank, world, options):
    """Return a model after one step, so that no weight is as in the source."""
    model = build(source, **options)
    step(model, adamw(model), 0, rank, world)
    return model


@pytest.mark.parametrize(("family", "tied", "options"), CASES)
def test_lora_exports_are_the_live_model(tiny, tmp_path, family, tied, options):
    source = tiny(family, tied=tied, layers=2)

    def body(rank, world):
        model = trained(source, rank, world, {**options, "lora": True, "rank_of_lora": 3})
        merged = export_merged(tmp_path / "out" / "model", model, source=source_of(source))
        export_adapter(tmp_path / "out" / "adapter", model, source=source_of(source), base="org/base")
        logits = probe_logits(model, IDS)
        step(model, adamw(model), 1, rank, world)
        return merged, logits

    (exported, live), (same, equal) = run_ranks(body, 2)
    assert exported == same
    assert torch.equal(live, equal)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["adapter", "model"]
    base = AutoModelForCausalLM.from_pretrained(source)
    assert (probe_logits(base, IDS) - live).abs().max() > 1e-2, "else a lost adapter would not show"
    assert_merged(exported, source, live)
    assert_adapter(tmp_path / "out" / "adapter", base, live)


@pytest.mark.parametrize(("family", "tied", "options"), CASES[1:3])
def test_full_fine_tuning_export_is_the_live_model(tiny, tmp_path, family, tied, options):
    source = tiny(family, tied=tied, layers=2)

    def body(rank, world):
        model = trained(source, rank, world, options)
        tokenizer = AutoTokenizer.from_pretrained(source)
        exported = export_merged(tmp_path / "model", model, source=source_of(source), tokenizer=tokenizer)
        return exported, probe_logits(model, IDS)

    exported, live = run_ranks(body, 2)[0]
    assert_merged(exported, source, live)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template


def assert_merged(exported, source: Path, live: torch.Tensor) -> None:
    """Assert that a model folder is as transformers writes it, and computes what the live model computed."""
    folder = exported.path
    assert keys(folder) == keys(source)
    assert exported.tensors == len(keys(source))
    assert exported.dtype == torch.float32
    assert exported.notes == ()
    assert exported.bytes == pytest.approx(exported.source_bytes, rel=0.01)
    reopened, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values())
    assert (probe_logits(reopened, IDS) - live).abs().max() < 1e-5
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text()) == json.loads((source / name).read_text())


def assert_adapter(folder: Path, base, live: torch.Tensor) -> None:
    """Assert that an adapter folder is as PEFT writes it, and computes what the live model computed."""
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/base"
    assert config["inference_mode"] is True
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (3, 8, "CAUSAL_LM")
    reopened = PeftModel.from_pretrained(base, folder)
    assert (probe_logits(reopened, IDS) - live).abs().max() < 1e-5
    reopened.save_pretrained(folder.with_name("by_peft"))
    theirs = load_file(folder.with_name("by_peft") / "adapter_model.safetensors")
    ours = load_file(folder / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].any() for name in ours)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_dtype_is_the_sources_and_merging_rounds_once(tiny, tmp_path, stored):
    source = tiny("llama", layers=2, dtype=stored)

    def body(rank, world, out):
        model = trained(source, rank, world, {"lora": True, "dtype": stored})
        low_rank = {name: part.detach().full_tensor() for name, part in model.named_parameters() if "lora_" in name}
        exported = export_merged(out, model, source=source_of(source))
        assert exported.dtype == stored
        assert exported.bytes == pytest.approx(exported.source_bytes, rel=0.01)
        whole = export_merged(out.with_name("fp32"), model, source=source_of(source), dtype=torch.float32)
        assert whole.bytes == pytest.approx(2 * exported.source_bytes, rel=0.03)
        return low_rank

    low_rank = run_ranks(body, 2, tmp_path / "half")[0]
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "half" / "model.safetensors")
    fp32 = load_file(tmp_path / "fp32" / "model.safetensors")
    assert {tensor.dtype for tensor in after.values()} == {stored}
    assert {tensor.dtype for tensor in fp32.values()} == {torch.float32}
    assert AutoConfig.from_pretrained(tmp_path / "half").dtype == stored
    assert AutoConfig.from_pretrained(tmp_path / "fp32").dtype == torch.float32
    name = "model.layers.1.self_attn.q_proj"
    a, b = (low_rank[f"base_model.model.{name}.lora_{half}.default.weight"] for half in "AB")
    exact = before[f"{name}.weight"].float() + (b @ a) * 2.0
    assert torch.equal(fp32[f"{name}.weight"], exact)
    assert torch.equal(after[f"{name}.weight"], exact.to(stored))
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


def test_padded_vocabulary_is_kept_and_export_replaces_an_older_one(tiny, tmp_path):
    source = tiny("llama", layers=2, vocab=104)

    def body(rank, world, out):
        model = trained(source, rank, world, {"lora": True})
        export_merged(out, model, source=source_of(source))
        step(model, adamw(model), 1, rank, world)
        export_merged(out, model, source=source_of(source))

    run_ranks(body, 2, tmp_path / "model")
    assert keys(tmp_path / "model")["lm_head.weight"] == (104, 64)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_large_models_are_split_with_an_index(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "_SHARD_SIZE", "100KB")
    source = tiny("llama", layers=2)

    def body(rank, world, out):
        export_merged(out, build(source), source=source_of(source))

    run_ranks(body, 2, tmp_path / "model")
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == keys(source).keys()
    assert len(set(index["weight_map"].values())) > 2
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gemma", "phi3"])
def test_keys_of_other_families_are_the_sources(tiny, tmp_path, family):
    """Some families are stored in another layout than they live in (experts)."""
    options = {"num_local_experts": 4} if family == "mixtral" else {}
    if family == "qwen3_moe":
        options = {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
    source = tiny(family, layers=2, tied=family == "gemma", **options)

    def body(rank, world, out):
        exported = export_merged(out, build(source), source=source_of(source))
        assert exported.notes == ()

    run_ranks(body, 2, tmp_path / "model")
    assert keys(tmp_path / "model") == keys(source)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", source))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_trained_copies_of_modules_take_the_place_of_the_originals(tiny, tmp_path):
    source = tiny("llama", layers=2)

    def body(rank, world, out):
        model = AutoModelForCausalLM.from_pretrained(source)
        config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
        for block in model.get_decoder().layers:
            fully_shard(block)
        fully_shard(model)
        step(model, adamw(model), 0, rank, world)
        export_merged(out / "model", model, source=source_of(source))
        export_adapter(out / "adapter", model, source=source_of(source))
        return probe_logits(model, IDS)

    live = run_ranks(body, 2, tmp_path)[0]
    reopened = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert (probe_logits(reopened, IDS) - live).abs().max() < 1e-5
    reopened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(source), tmp_path / "adapter")
    assert (probe_logits(reopened, IDS) - live).abs().max() < 1e-5


WHOLE = [
    ("llama", torch.float32, ["lm_head", "norm"], {}),
    ("llama", torch.bfloat16, ["lm_head", "norm"], {}),
    ("qwen2", torch.float32, ["embed_tokens", "lm_head"], {"activation_checkpointing": "full"}),
    ("qwen2", torch.bfloat16, ["input_layernorm", "lm_head"], {"activation_checkpointing": "full"}),
    ("deepseek_v3", torch.float32, ["gate"], {"lora_targets": ["o_proj"]}),
]
DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "head_dim": 16,
    "kv": 2,
}


@pytest.mark.parametrize(("family", "dtype", "modules", "fields"), WHOLE)
def test_modules_trained_whole_are_in_both_exports(tiny, tmp_path, family, dtype, modules, fields):
    """The router of deepseek_v3 has a persistent buffer, which belongs to the copy too."""
    source = tiny(family, layers=2, dtype=dtype, **(DEEPSEEK if family == "deepseek_v3" else {}))
    job = make_job(
        source,
        use_lora=True,
        lora_modules_to_save=modules,
        fsdp={"strategy": "FULL_SHARD"},
        micro_batch=3,
        **fields,
    )

    def body(rank, world):
        plan = make_plan(job, world)
        model = load_model(job, plan, source_of(source), build_mesh(plan.mesh, "cpu"))
        step(model, adamw(model), 0, rank, world)
        adapter = export_adapter(tmp_path / "adapter", model, source=source_of(source))
        merged = export_merged(tmp_path / "merged", model, source=source_of(source))
        return adapter, merged, probe_logits(model, IDS)

    adapter, merged, live = run_ranks(body, 2)[0]
    stored = load_file(adapter.path / "adapter_model.safetensors")
    whole = {name.removeprefix("base_model.model.") for name in stored if "lora_" not in name}
    assert {name.split(".")[-2] for name in whole} == set(modules)
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}, "as they were trained"
    before, after = load_file(source / "model.safetensors"), load_file(merged.path / "model.safetensors")
    assert keys(merged.path) == keys(source)
    for name in whole:
        trained = stored[f"base_model.model.{name}"].to(dtype)
        assert torch.equal(after[name], trained)
        assert name.endswith("bias") or not torch.equal(trained, before[name]), f"{name} was not trained"
    assert_opened_by_peft(adapter.path, source, live, stored)
    assert_verified(adapter, merged, source, live, DTYPE_NAME[dtype])


def assert_opened_by_peft(folder: Path, source: Path, live: torch.Tensor, stored: dict[str, torch.Tensor]) -> None:
    """Assert that plain PEFT on the base in fp32 answers as the live model, and writes the same file again."""
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    before = probe_logits(base, IDS)
    reopened = PeftModel.from_pretrained(base, folder)
    assert (probe_logits(reopened, IDS) - live).abs().max() < 1e-5
    assert (before - live).abs().max() > 1e-2, "else a lost module would not show"
    reopened.save_pretrained(folder.with_name("by_peft"))
    theirs = load_file(folder.with_name("by_peft") / "adapter_model.safetensors")
    assert stored.keys() == theirs.keys()
    assert all(torch.equal(stored[name], theirs[name]) for name in stored)


def assert_verified(adapter, merged, source: Path, live: torch.Tensor, base: str) -> None:
    """Assert that both exports pass the check of `verify`, and that an adapter with another module does not."""
    expect = adapter.path.with_name("expect")

    def found(exported):
        tolerance = str(tolerance_for(exported, "fp32", live, base))
        told = {"computed": "fp32", "base_dtype": "", "tolerance": tolerance}
        save_file({"input_ids": IDS, "logits": live}, expect, told)
        return verify(exported.path, expect, source, None)

    assert [found(exported).reason for exported in (adapter, merged)] == ["", ""]
    stored = load_file(adapter.path / "adapter_model.safetensors")
    changed = {name: tensor if "lora_" in name else tensor * 2 for name, tensor in stored.items()}
    save_file(changed, adapter.path / "adapter_model.safetensors")
    assert "logits differ" in found(adapter).reason


@pytest.mark.parametrize("where", ["_merged", "compare_files", "prepare"])
def test_failure_on_rank_0_is_an_error_on_all_and_leaves_nothing(tiny, tmp_path, where):
    source = tiny("llama", layers=2)

    def body(rank, world, out):
        model = build(source, lora=True)

        def full_disk(*args, **options):
            raise OSError(28, "No space left on device")

        export_merged(out, model, source=source_of(source))
        if rank == 0:
            setattr(export.folders if where == "prepare" else export, where, full_disk)
        with pytest.raises(ExportError, match=r"rank 0: OSError: .* No space left") as caught:
            export_merged(out, model, source=source_of(source))
        return str(caught.value)

    messages = run_ranks(body, 2, tmp_path / "model")
    assert messages[0] == messages[1]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert keys(tmp_path / "model") == keys(source)


def test_refusals(tiny, tmp_path):
    source = tiny("llama", layers=2)
    other = tiny("llama", layers=3)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")

    def body(rank, world, out):
        model = build(source, lora=True)
        with pytest.raises(ExportError, match="holds something else than an export"):
            export_merged(out / "mine", model, source=source_of(source))
        with pytest.raises(ExportError, match="9 weights do not fit the source's config"):
            export_merged(out / "model", model, source=source_of(other))
        layer = next(module for module in model.modules() if isinstance(module, LoraLayer))
        layer.lora_variant["default"] = object()
        with pytest.raises(ExportError, match=r"DoRA.*export the adapter instead"):
            export_merged(out / "model", model, source=source_of(source))
        layer.lora_variant.clear()
        with torch.no_grad():
            layer.base_layer.weight.fill_(1e6)
        with pytest.raises(ExportError, match="too large for fp16"):
            export_merged(out / "model", model, source=source_of(source), dtype=torch.float16)

    run_ranks(body, 2, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_files_are_compared_bit_for_bit(tmp_path):
    tensors = {"a": torch.tensor([1.0, float("nan"), -0.0]), "b": torch.ones(2, 2, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")
    export.compare_files(tmp_path, tensors)
    for changed, told in [
        ({**tensors, "a": torch.tensor([1.0, float("nan"), 0.0])}, "a was read back with other bytes"),
        ({**tensors, "b": torch.ones(2, 2)}, "b was read back as bfloat16"),
        ({**tensors, "b": torch.ones(4, dtype=torch.bfloat16)}, "b was read back as bfloat16"),
        ({"a": tensors["a"]}, "holds b, which should not be there"),
        ({**tensors, "c": tensors["a"]}, "lack 1 tensors: c"),
    ]:
        with pytest.raises(ValueError, match=told):
            export.compare_files(tmp_path, changed)


def test_low_rank_pair_of_a_transposed_layer():
    a, b = torch.randn(2, 5), torch.randn(3, 2)
    pair = merge.LowRank(a=a, b=b, scale=0.5, transposed=True)
    assert torch.allclose(pair.added_to(torch.zeros(5, 3)), (0.5 * b @ a).T)
