"""Modules trained whole beside adapters: named exactly, loaded twice, trained as one process trains them."""

from __future__ import annotations

import pytest
import torch
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from engine.training import full, make_expected, make_job, make_plan, train_alone, train_on_rank
from harness.ranks import run_ranks
from harness.runs import make_run, train
from shardwise.engine.expected import expect
from shardwise.engine.load import build_skeleton, load_model
from shardwise.engine.mesh import build_mesh
from shardwise.engine.names import base_name, unwrapped_name
from shardwise.engine.source import open_source
from shardwise.spec.problems import BadInput
from shardwise.spec.reader import job_to_yaml, read_job, read_job_dict

MODULES = {
    "head": ["lm_head"],
    "both-ends": ["embed_tokens", "lm_head"],
    "norms-in-blocks": ["input_layernorm"],
}
STEPS = 2
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def _job(folder, modules, **fields):
    given = {"fsdp": {"strategy": "FULL_SHARD"}, "micro_batch": 3, **fields}
    return make_job(folder, use_lora=True, lora_modules_to_save=modules, **given)


def _skeleton(job):
    source = open_source(job.model)
    return build_skeleton(job, source.config, source.dtype, source)


def _whole(model):
    """Names of the modules that are trained whole, in the plain model."""
    return [
        name.removeprefix("base_model.model.")
        for name, module in model.named_modules()
        if isinstance(module, ModulesToSaveWrapper)
    ]


def _in_fp32(job):
    """The same job with the same frozen weights stored in fp32, in which one process can compute."""
    return job.model_copy(update={"model": job.model.model_copy(update={"dtype": "fp32"})})


def _assert_equal(job, modules):
    live, other = run_ranks(train_on_rank, 2, job, STEPS)
    alone = train_alone(_in_fp32(job), 2, 1, live.norms, steps=STEPS)
    assert live.norms == pytest.approx(alone.norms, rel=1e-6)
    assert live.gradients.keys() == alone.gradients.keys()
    whole = [name for name in live.gradients if ".lora_" not in name]
    assert {name.split(".")[-2] for name in whole} == set(modules)
    for name, gradient in live.gradients.items():
        assert torch.equal(gradient, alone.gradients[name]), f"gradient of {name}"
        assert name not in whole or gradient.any(), f"{name} got no gradient"
    for name, weight in live.weights.items():
        assert torch.equal(weight, alone.weights[name]), f"weight {name}"
        assert torch.equal(weight, other.weights[name]), f"{name} differs between ranks"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MODULES)
def test_two_ranks_equal_one_process(tiny, name, strategy):
    _assert_equal(_job(tiny("llama", layers=2), MODULES[name], fsdp={"strategy": strategy}), MODULES[name])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MODULES)
def test_two_ranks_equal_one_process_on_a_bf16_base(tiny, name, strategy):
    """Trained copies in fp32 share units with bf16 weights; blocks are recomputed."""
    folder = tiny("llama", layers=2, dtype=torch.bfloat16)
    fields = {"activation_checkpointing": "full", "fsdp": {"strategy": strategy}}
    job = _job(folder, MODULES[name], model={"path": str(folder), "dtype": "bf16"}, **fields)
    assert {tuple(row.stored_by_dtype) for row in make_expected(job, make_plan(job, 2)).units.rows} <= {
        ("bfloat16", "float32"),
        ("bfloat16",),
    }
    _assert_equal(job, MODULES[name])


def test_units_of_their_own_equal_one_process(tiny):
    modules = ["embed_tokens", "lm_head"]
    job = _job(tiny("llama", layers=2), modules, units={"embedding": "own", "head": "own"})
    rows = {row.name: row for row in make_expected(job, make_plan(job, 2)).units.rows}
    for name in ("model.embed_tokens", "lm_head"):
        assert (rows[name].parameters, rows[name].trainable) == (2 * 101 * 64, 101 * 64)
    assert rows["root"].trainable == 0
    _assert_equal(job, modules)


def test_chunked_loss_head_trains_the_copy_of_the_head(tiny):
    job = _job(tiny("llama", layers=2), ["lm_head"], loss_head="chunked", loss_chunk=5)
    live = run_ranks(train_on_rank, 2, job, STEPS)[0]
    alone = train_alone(job, 2, 1, live.norms, steps=STEPS)
    assert live.losses == pytest.approx(alone.losses, rel=1e-6)
    for name, gradient in live.gradients.items():
        torch.testing.assert_close(gradient, alone.gradients[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("modules", "fields"),
    [
        (["lm_head"], {"units": {"head": "own"}}),
        (["input_layernorm"], {"units": {"wrap": ("LlamaRMSNorm",)}}),
        (["lm_head", "norm"], {"units": {"wrap": ("Linear",)}}),
        (["mlp"], {"units": {"wrap": ("LlamaMLP", "LlamaAttention")}, "activation_checkpointing": "full"}),
    ],
)
def test_first_step_of_a_run_is_as_planned(tiny, tmp_path, modules, fields):
    """Whatever classes are units, frozen originals, which no forward reaches, are not: they would never be gathered."""
    fields = {"fsdp": {"strategy": "FULL_SHARD"}, "steps": 1, **fields}
    prepared = make_run(tmp_path, tiny("llama", layers=2), lora_modules_to_save=modules, **fields)
    assert not any(".original_module" in row.name for row in prepared.preview.units.rows)
    assert {result["state"] for result in run_ranks(train, 2, prepared)} == {"finished"}
    assert prepared.folder.first_step.is_file()


def test_a_stopped_and_resumed_run_is_bitwise_the_uninterrupted_one(tiny, tmp_path):
    fields = {"lora_modules_to_save": ["lm_head", "input_layernorm"], "steps": 4}
    results = []
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
        prepared = make_run(tmp_path / name, tiny("llama", layers=2), **fields)
        results.append(run_ranks(train, 2, prepared, 2 if name == "cut" else None)[0])
    whole, cut = results
    assert (whole["state"], cut["state"], cut["step"]) == ("finished", "stopped", 2)
    resumed = run_ranks(train, 2, make_run(tmp_path / "cut", tiny("llama", layers=2), resume="auto", **fields))[0]
    assert resumed["weights"].keys() == whole["weights"].keys()
    assert {"lm_head.weight", "model.layers.1.input_layernorm.weight"} <= whole["weights"].keys()
    for name, weight in whole["weights"].items():
        assert torch.equal(resumed["weights"][name], weight), name
        assert not name.startswith("lm_head") or not torch.equal(cut["weights"][name], weight), "nothing left to learn"
    for one, other in zip(whole["moments"], resumed["moments"], strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


LOADED = {
    "llama": (["lm_head", "norm", "mlp"], {}),
    "qwen2": (["embed_tokens", "q_proj"], {}),
    "mixtral": (["gate", "experts"], {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.mark.parametrize("family", LOADED)
def test_original_and_trained_copy_both_get_the_checkpoints_weights(tiny, family):
    modules, options = LOADED[family]
    folder = tiny(family, layers=2, **options)

    def body(rank, world, job):
        plan = make_plan(job, world)
        model = load_model(job, plan, open_source(job.model), build_mesh(plan.mesh, "cpu"))
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        return {unwrapped_name(name): (full(p), p.requires_grad) for name, p in model.named_parameters()}

    found = run_ranks(body, 2, _job(folder, modules, model={"path": str(folder), "dtype": "bf16"}))[0]
    originals = {name: value for name, value in found.items() if ".original_module." in name}
    copies = {name: value for name, value in found.items() if ".modules_to_save." in name}
    assert len(originals) == len(copies) > 0
    for name, (weight, trained) in copies.items():
        original, also = originals[name.replace(".modules_to_save.default.", ".original_module.")]
        assert (trained, also) == (True, False)
        assert (weight.dtype, original.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(weight.bfloat16(), original)
        assert weight.any()
    stored = load_file(folder / "model.safetensors")
    for name, (weight, _) in copies.items():
        if base_name(name) in stored:
            assert torch.equal(weight, stored[base_name(name)]), "not rounded on the way"
    assert family == "mixtral" or all(base_name(name) in stored for name in copies)


@pytest.mark.parametrize(
    ("modules", "found", "for_peft"),
    [
        (["lm_head"], ["lm_head"], ["lm_head"]),
        (["norm"], ["model.norm"], ["model.norm"]),
        (["norm", "model.norm"], ["model.norm"], ["model.norm"]),
        (
            ["input_layernorm"],
            ["model.layers.0.input_layernorm", "model.layers.1.input_layernorm"],
            ["input_layernorm"],
        ),
        (["layers.1.self_attn.q_norm"], ["model.layers.1.self_attn.q_norm"], ["layers.1.self_attn.q_norm"]),
    ],
)
def test_names_mean_whole_parts_of_names(tiny, modules, found, for_peft):
    """PEFT itself takes `norm` for every module whose name ends in these letters."""
    model = _skeleton(_job(tiny("qwen3", layers=2), modules)).model
    assert _whole(model) == found
    assert model.peft_config["default"].modules_to_save == for_peft


def test_all_linear_leaves_out_what_is_trained_whole(tiny):
    model = _skeleton(_job(tiny("llama", layers=2), ["mlp", "layers.0.self_attn.v_proj"])).model
    adapted = {name.split(".lora_A")[0][len("base_model.model.model.") :] for name, _ in model.named_parameters()}
    adapted = {name for name in adapted if not name.endswith("weight")}
    kept = {f"layers.{i}.self_attn.{part}_proj" for i in range(2) for part in "qkvo"}
    assert adapted == kept - {"layers.0.self_attn.v_proj"}


REFUSED = [
    ({}, ["lm_hed"], r"'lm_hed': matches no module of this model; allowed: .*embed_tokens.*did you mean 'lm_head'"),
    ({}, ["head"], "'head': matches no module of this model"),
    ({}, ["act_fn"], r"layers\.0\.mlp\.act_fn has no weights"),
    ({}, ["layers"], "model.layers holds a whole block, which full fine-tuning"),
    ({}, ["layers.1"], "model.layers.1 holds a whole block"),
    ({}, ["mlp", "up_proj"], r"'up_proj': model\.layers\.0\.mlp\.up_proj lies in model\.layers\.0\.mlp"),
    ({"tied": True}, ["lm_head"], "lm_head shares its weights with model.embed_tokens, and a trained copy would part"),
    ({"tied": True}, ["embed_tokens"], "model.embed_tokens shares its weights with lm_head"),
    ({"lora_targets": ["q_proj", "lm_head"]}, ["lm_head"], "contradicts lora_targets: lm_head, which gives lm_head an"),
    ({"lora_targets": ["q_proj"]}, ["self_attn"], r"lora_targets: q_proj, which gives model\.layers\.0\.self_attn"),
    ({}, ["self_attn", "mlp"], "leaves no linear layer for an adapter; train all weights"),
    ({"mesh": {"tensor": 2}}, ["lm_head"], r"contradicts mesh.tensor: 2, .*remove one of the two"),
]


@pytest.mark.parametrize(("fields", "modules", "words"), REFUSED)
def test_what_cannot_be_trained_whole_is_refused_before_ranks_start(tiny, fields, modules, words):
    fields = dict(fields)
    folder = tiny("llama", layers=2, tied=fields.pop("tied", False))
    with pytest.raises(BadInput, match=words) as caught:
        _skeleton(_job(folder, modules, **fields))
    assert {problem.field for problem in caught.value.problems} == {"lora_modules_to_save"}


def test_every_name_that_is_wrong_is_told(tiny):
    with pytest.raises(BadInput) as caught:
        _skeleton(_job(tiny("llama", layers=2), ["lm_head", "nrom", "rotary_emb"]))
    assert [problem.value for problem in caught.value.problems] == ["nrom", "rotary_emb"]


def test_a_tied_model_may_train_its_norms_whole(tiny):
    assert len(_whole(_skeleton(_job(tiny("llama", layers=2, tied=True), ["input_layernorm", "norm"])).model)) == 3


def test_trained_dtypes_that_differ_in_a_unit_are_refused(tiny):
    """A Job stores all that trains in one dtype; a model given by hand may not."""
    job = _job(tiny("llama", layers=2), ["input_layernorm"])
    model, plan = _skeleton(job).model, make_plan(job, 2)
    for name, parameter in model.named_parameters():
        if ".modules_to_save." in name:
            parameter.data = parameter.data.bfloat16()
    words = r"units: 'base_model.model.model.layers.0': its trained parameters have several dtypes .*bfloat16"
    with pytest.raises(BadInput, match=words):
        expect(model, plan)
    apart = plan.model_copy(update={"units": plan.units.model_copy(update={"wrap": ("LlamaRMSNorm", "LlamaMLP")})})
    assert "model.layers.0.input_layernorm.modules_to_save.default" in {
        row.name for row in expect(model, apart).units.rows
    }


def test_the_key_and_its_other_name():
    given = {"model": "m", "data": "d.jsonl", "use_lora": True}
    job = read_job_dict({**given, "modules_to_save": ["lm_head", "norm"]})
    assert job.lora_modules_to_save == ["lm_head", "norm"]
    assert read_job(None, text=job_to_yaml(job)) == job
    assert read_job_dict(given).lora_modules_to_save == []
    assert read_job_dict(given, ["lora_modules_to_save=[norm]"]).lora_modules_to_save == ["norm"]
    with pytest.raises(BadInput, match=r"modules_to_save: .*has no effect without use_lora: true"):
        read_job_dict({**given, "use_lora": False, "modules_to_save": ["lm_head"]})
    with pytest.raises(BadInput, match="must be a list of module names"):
        read_job_dict({**given, "lora_modules_to_save": "lm_head"})
