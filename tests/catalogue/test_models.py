"""Public model shapes: their published sizes, the names that people type, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from catalogue.shapes import BASE, config
from shardwise.catalogue import entries
from shardwise.catalogue.families.fields import TRACE
from shardwise.catalogue.families.registry import FORMULAS
from shardwise.catalogue.models import (
    catalogue_name,
    checkpoint_dtype,
    find_model,
    model_from_config,
    model_from_dimensions,
    model_names,
)
from shardwise.spec.problems import BadInput

PUBLISHED = Path(__file__).resolve().parents[2] / "bench" / "measurements" / "published.jsonl"


def refusal(call, *args, **kwargs):
    """The one line that a refusal is."""
    with pytest.raises(BadInput) as refused:
        call(*args, **kwargs)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_it_holds_the_families_that_people_use():
    assert len(model_names()) >= 64
    held = {find_model(name).model_type for name in model_names()}
    assert held >= {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3"}
    assert held >= {"gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt2", "gpt_neox", "gpt_bigcode", "opt", "bloom"}
    assert held <= set(FORMULAS)


@pytest.mark.parametrize("name", model_names())
def test_parameters_are_the_published_ones(name):
    published, counted = entries.published_parameters(name), find_model(name).parameters
    assert abs(counted - published) <= 0.01 * published
    if published % 10**7:
        assert counted == published, "an exact count was published"


def test_active_parameters_of_mixtures_are_the_published_ones():
    published = {
        "mixtral-8x7b": 12.9,
        "mixtral-8x22b": 39,
        "qwen3-30b-a3b": 3.3,
        "qwen3-235b-a22b": 22,
        "deepseek-v3": 37,
        "deepseek-v2": 21,
        "olmoe-1b-7b": 1.3,
    }
    for name, billions in published.items():
        assert find_model(name).active_parameters / 1e9 == pytest.approx(billions, rel=0.05), name


def test_blocks_come_in_kinds():
    gemma = find_model("gemma-3-1b")
    assert [kind.name for kind in gemma.kinds] == ["sliding window", "full attention"]
    assert gemma.blocks == tuple(int((i + 1) % 6 == 0) for i in range(26))
    assert [kind.attention.window for kind in gemma.kinds] == [512, None]
    deepseek = find_model("deepseek-v3")
    assert [kind.name for kind in deepseek.kinds] == ["dense", "mixture of experts"]
    assert deepseek.blocks == (0,) * 3 + (1,) * 58
    assert [kind.name for kind in find_model("llama-3-8b").kinds] == ["block"]
    assert find_model("mistral-7b-v0.1").kinds[0].attention.window == 4096
    assert find_model("mistral-7b-v0.3").kinds[0].attention.window is None


def test_the_article_s_model_stands_in_for_remote_code():
    spec = find_model("qwen-7b")
    attention, mlp = spec.kinds[0].attention, spec.kinds[0].mlp
    assert (spec.layers, spec.hidden, spec.vocab, spec.tied, mlp.width) == (32, 4096, 151936, False, 11008)
    assert (attention.heads, attention.kv_heads, mlp.gated, mlp.activation) == (32, 32, True, "silu")
    assert "remote code" in spec.note
    assert "Qwen2" in spec.note


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("llama-3.1-8b", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("META-LLAMA/meta_llama_3.1_8b", "llama-3.1-8b"),
        ("llama_3_1_8b", "llama-3.1-8b"),
        ("llama3.1-8b", "llama-3.1-8b"),
        ("Meta-Llama-3-8B", "llama-3-8b"),
        ("qwen2.5-7b", "qwen2.5-7b"),
        ("Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/Qwen-1_8B-Chat", "qwen-1.8b"),
        ("qwen-7b", "qwen-7b"),
        ("gpt2-xl", "gpt2-xl"),
        ("GPT2", "gpt2"),
        ("opt-1.3b", "opt-1.3b"),
        ("opt-13b", "opt-13b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("microsoft/phi-1_5", "phi-1.5"),
        ("DeepSeek-R1", "deepseek-v3"),
    ],
)
def test_names_as_people_type_them(typed, name):
    assert find_model(typed).name == name


def test_no_name_means_two_models():
    meant: dict[str, str] = {}
    for entry in model_names():
        for name in entries.names_of(entry):
            assert catalogue_name(name) == entry, name
            assert meant.setdefault(name, entry) == entry, name


def test_the_same_shape_is_the_same_object():
    assert find_model("gpt2") is find_model("openai-community/gpt2")


def test_dtype_of_published_weights():
    assert checkpoint_dtype(find_model("llama-3-8b")) == "bf16"
    assert checkpoint_dtype(find_model("gpt2")) == "fp32"
    assert checkpoint_dtype(find_model("phi-2")) == "fp16"
    assert checkpoint_dtype(model_from_config(config("llama", BASE), name="unsaid")) is None


def write(folder, **fields):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_a_folder_and_its_config(tmp_path):
    given = {**config("llama", BASE), "torch_dtype": "bfloat16", "architectures": ["X"], "transformers_version": "4"}
    folder = write(tmp_path / "gpt2", **given)
    spec = find_model(str(folder))
    assert spec == find_model(str(folder / "config.json")).model_copy(update={"name": str(folder)})
    assert spec.config == {**config("llama", BASE), "dtype": "bfloat16"}
    assert checkpoint_dtype(spec) == "bf16"


def test_a_quantised_checkpoint_says_so(tmp_path):
    folder = write(tmp_path, **config("llama", BASE), quantization_config={"quant_method": "awq"})
    assert "quantised" in find_model(str(folder)).note


def test_unknown_names_are_refused_with_the_nearest():
    line = refusal(find_model, "lama-3.1-8b")
    assert "'lama-3.1-8b'" in line
    assert "did you mean 'Llama-3.1-8B'?" in line
    assert "give a name in the catalogue" in refusal(find_model, "zzz")
    assert "give a name in the catalogue" in refusal(find_model, "")


def test_a_folder_without_config_is_refused(tmp_path):
    assert "has no config.json" in refusal(find_model, str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "config.json cannot be read" in refusal(find_model, str(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    assert "holds no mapping" in refusal(find_model, str(tmp_path))


class Answer:
    """What the hub would answer."""

    def __init__(self, content):
        self.content = content

    def get(self, url, **_):
        assert url.endswith("/someone/model/resolve/main/config.json")
        if isinstance(self.content, Exception):
            raise self.content
        return self

    def raise_for_status(self):
        return self

    def json(self):
        return self.content


def test_a_hub_id_is_fetched_or_refused_in_one_line(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "get_session", lambda: Answer(config("llama", BASE)))
    assert find_model("someone/model").name == "someone/model"
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: Answer(OSError("Name or service not known\nmore")))
    line = refusal(find_model, "someone/model")
    assert "not cached, and the hub did not give its config.json: Name or service not known;" in line
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: Answer([]))
    assert "holds no mapping" in refusal(find_model, "someone/model")


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_config_that_lacks_a_field(field):
    line = refusal(model_from_config, config("llama", BASE, field), name="mine")
    assert line.startswith(f"mine: {field}: is missing")


@pytest.mark.parametrize("value", [0, -3, 2.5, True, "4"])
def test_sizes_have_to_be_above_zero(value):
    line = refusal(model_from_config, config("qwen2", BASE, num_hidden_layers=value), name="mine")
    assert line == f"mine: num_hidden_layers: {value!r}: has to be a whole number above 0"


def test_everything_that_is_wrong_is_said_at_once():
    wrong = config("llama", BASE, "vocab_size", hidden_size=0, hidden_act="sine")
    with pytest.raises(BadInput) as refused:
        model_from_config(wrong, name="mine")
    assert [problem.field for problem in refused.value.problems] == ["mine: hidden_act", "mine: hidden_size"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (config("llama", BASE, hidden_size=62), "hidden_size: 62: is not a multiple of num_attention_heads 4"),
        (config("mistral", BASE, num_key_value_heads=3), "is not a multiple of num_key_value_heads 3"),
        (config("gpt2", {"n_embd": 10, "n_head": 3, "n_layer": 1, "n_positions": 9, "vocab_size": 5}), "n_embd: 10"),
        (config("qwen3", BASE, head_dim=None), "head_dim: is null"),
        (config("nemotron", BASE, "num_key_value_heads"), "num_key_value_heads: is missing"),
        (config("gemma2", BASE, layer_types=["full_attention"]), "layer_types: has 1 entries, but the model has 4"),
        (config("gemma2", BASE, layer_types="full"), "layer_types: 'full': has to be a list of words"),
        (config("llama", BASE, tie_word_embeddings="yes"), "tie_word_embeddings: 'yes': has to be true or false"),
        (config("llama", BASE, hidden_act="silly"), "did you mean 'silu'?"),
        (config("gpt2", BASE, add_cross_attention=True), "add_cross_attention: True: is not known by formula"),
        (config("deepseek_v3", BASE, "num_key_value_heads"), "moe_intermediate_size: is missing"),
        (
            config("deepseek_v2", BASE, first_k_dense_replace=-1),
            "first_k_dense_replace: -1: has to be a whole number of",
        ),
        (config("qwen3_moe", BASE, mlp_only_layers=["a"]), "has to be a list of whole numbers"),
        (config("smollm3", BASE, no_rope_layers=[1]), "no_rope_layers: has 1 entries"),
    ],
)
def test_what_does_not_fit_is_named(fields, said):
    with pytest.raises(BadInput) as refused:
        model_from_config(fields, name="mine")
    assert said in str(refused.value)


def test_kinds_of_models_without_a_formula():
    line = refusal(model_from_config, {"model_type": "mamba"}, name="mine")
    assert "mine: model_type: 'mamba': is not known by formula" in line
    assert "llama" in line
    assert TRACE in line
    assert "did you mean 'llama'?" in refusal(model_from_config, {"model_type": "lama"}, name="mine")
    assert "mine: model_type: is missing" in refusal(model_from_config, {}, name="mine")


DIMS = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 99, "tied": False}


@pytest.mark.parametrize(
    ("given", "model_type"),
    [
        ({"mlp": "swiglu"}, "llama"),
        ({"mlp": "swiglu", "hidden": 62, "head_dim": 8}, "mistral"),
        ({"mlp": "swiglu", "qkv_bias": True}, "qwen2"),
        ({"mlp": "swiglu", "qk_norm": True}, "qwen3"),
        ({"mlp": "geglu"}, "gemma"),
        ({"mlp": "relu2"}, "nemotron"),
        ({"mlp": "gelu", "learned_positions": True, "max_positions": 5}, "gpt2"),
        ({"mlp": "gelu", "learned_positions": True, "max_positions": 5, "kv_heads": 1}, "gpt_bigcode"),
        ({"mlp": "gelu"}, "gpt_neox"),
        ({"mlp": "gelu", "kv_heads": 2}, "phi"),
    ],
)
def test_sizes_become_a_class_of_transformers(given, model_type):
    assert model_from_dimensions(**{**DIMS, **given}).model_type == model_type


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mlp": "swiglu", "layers": 0}, "layers: 0: has to be a whole number above 0"),
        ({"mlp": "swiglu", "vocab": -1}, "vocab: -1"),
        ({"mlp": "swiglu", "head_dim": 0}, "head_dim: 0"),
        ({"mlp": "swiglu", "hidden": 62}, "hidden: 62: is not a multiple of heads 4"),
        ({"mlp": "swiglu", "kv_heads": 3}, "heads: 4: is not a multiple of kv_heads 3"),
        ({"mlp": "swiglu", "learned_positions": True, "max_positions": 9}, "learned_positions"),
        ({"mlp": "gelu", "learned_positions": True}, "max_positions: is missing"),
        ({"mlp": "gelu", "learned_positions": True, "max_positions": 9, "kv_heads": 2}, "kv_heads: 2"),
        ({"mlp": "gelu", "learned_positions": True, "max_positions": 9, "head_dim": 3}, "head_dim: 3"),
        ({"mlp": "geglu", "qkv_bias": True}, "qkv_bias: True: can be chosen with mlp swiglu only, not geglu"),
        ({"mlp": "gelu", "learned_positions": True, "max_positions": 9, "qk_norm": True}, "qk_norm: True"),
        ({"mlp": "swiglo"}, "mlp: 'swiglo': is unknown; allowed: swiglu, geglu, gelu, relu2; did you mean 'swiglu'?"),
    ],
)
def test_sizes_that_cannot_be(given, said):
    assert said in refusal(model_from_dimensions, **{**DIMS, **given})


def test_a_known_name_brings_its_class():
    falcon = {"layers": 32, "hidden": 4544, "heads": 71, "kv_heads": 1, "ffn": 18176, "vocab": 65024, "mlp": "gelu"}
    spec = model_from_dimensions(**falcon, tied=False, name="tiiuae/falcon-7b")
    assert (spec.model_type, spec.tied, spec.name) == ("falcon", False, "tiiuae/falcon-7b")
    qwen = find_model("qwen-7b")
    sizes = {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008, "vocab": 151936, "mlp": "swiglu"}
    assert model_from_dimensions(**sizes, tied=False, name="Qwen/Qwen-7B-Chat").note == qwen.note
    assert model_from_dimensions(**{**falcon, "vocab": 9}, tied=False, name="tiiuae/falcon-7b").model_type == "phi"


def test_shapes_of_published_measurements_have_their_size():
    counted = 0
    for line in PUBLISHED.read_text().splitlines():
        row = json.loads(line)
        given = row["model"]
        if given["layers"] is None or given["params_b"] is None:
            continue
        spec = model_from_dimensions(
            **{name: given[name] for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")},
            mlp=given["mlp"],
            tied=given["tied_embeddings"],
            learned_positions=given["learned_positions"],
            max_positions=row["plan"]["seq_len"] if given["learned_positions"] else None,
            name=given["name"],
        )
        assert spec.parameters / 1e9 == pytest.approx(given["params_b"], rel=0.03), row["id"]
        counted += 1
    assert counted > 400


COLD = """
import sys, time
import shardwise.spec.model_spec
begin = time.process_time()
from shardwise.catalogue.models import find_model
find_model("llama-3.1-8b")
print(time.process_time() - begin)
assert not {"torch", "transformers", "huggingface_hub"} & set(sys.modules), "the catalogue needs none of these"
"""


def test_a_cold_start_is_quick_and_needs_no_torch():
    done = subprocess.run([sys.executable, "-c", COLD], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.15
