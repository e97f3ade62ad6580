"""Models that are not here, damaged, incomplete or of another shape are refused with the reason."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.training import make_job
from shardwise.engine.load import build_skeleton
from shardwise.engine.source import ModelNotHere, build_on_meta, open_source, read_config
from shardwise.spec.job import ModelChoice
from shardwise.spec.problems import BadInput


def _copy(tiny, tmp_path, **options):
    return shutil.copytree(tiny("llama", **options), tmp_path / "model")


def _open(path):
    return open_source(ModelChoice(path=str(path)))


def test_a_near_folder_is_suggested(tiny, tmp_path):
    _copy(tiny, tmp_path)
    with pytest.raises(ModelNotHere, match=r"is not a folder; did you mean .*/model'"):
        _open(tmp_path / "modle")


def test_a_hub_id_that_nobody_gives(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotHere, match="neither a local folder nor cached"):
        open_source(ModelChoice(path="nobody/no-such-model"))


def test_a_folder_without_config(tmp_path):
    with pytest.raises(BadInput, match=r"has no config\.json"):
        _open(tmp_path)


def test_an_unknown_model_type(tiny, tmp_path):
    folder = _copy(tiny, tmp_path)
    (folder / "config.json").write_text(json.dumps({"model_type": "lama"}))
    with pytest.raises(BadInput, match=r"config\.json cannot be used"):
        _open(folder)


def test_a_folder_without_weights(tiny, tmp_path):
    folder = _copy(tiny, tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadInput, match=r"has no model\.safetensors"):
        _open(folder)


def test_an_index_that_names_missing_files(tiny, tmp_path):
    folder = _copy(tiny, tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00002.safetensors"}}))
    with pytest.raises(BadInput, match=r"not here: model-00002\.safetensors"):
        _open(folder)


def test_damaged_weights(tiny, tmp_path):
    folder = _copy(tiny, tmp_path)
    (folder / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00not a header at")
    with pytest.raises(BadInput, match="weight files"):
        _open(folder)


def test_quantised_weights_are_refused(tiny, tmp_path):
    folder = _copy(tiny, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t.to(torch.int8) for n, t in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(BadInput, match="stored as I8; allowed: F32, BF16, F16"):
        _open(folder)


def test_an_incomplete_checkpoint_is_refused_before_any_rank_starts(tiny, tmp_path):
    folder = _copy(tiny, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    source = _open(folder)
    with pytest.raises(BadInput, match=r"1 tensors of LlamaForCausalLM are not in it: model\.layers\.1\.mlp\.up_proj"):
        build_skeleton(make_job(folder), source.config, source.dtype, source)


def test_weights_of_another_shape(tiny, tmp_path):
    folder = _copy(tiny, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(65)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    source = _open(folder)
    words = r"'model\.norm\.weight': has shape \[65\] in the checkpoint and \[64\] in the model"
    with pytest.raises(BadInput, match=words):
        build_skeleton(make_job(folder), source.config, source.dtype, source)


def test_an_attention_that_cannot_be_used_here(tiny):
    config = read_config(tiny("llama"))
    with pytest.raises(BadInput, match=r"model\.attention: 'flash_attention_2'.*use sdpa"):
        build_on_meta(config, attention="flash_attention_2", dtype=torch.float32)


def test_an_encoder_is_no_causal_lm(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(BadInput):
        build_on_meta(read_config(tmp_path), attention=None, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_stored_dtype_is_read_from_the_files(tiny, dtype):
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    assert _open(tiny("llama", dtype=dtype)).dtype == names[dtype]
