"""Every loss head gives the same loss and gradients; only what is alive at once is different."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.training import make_job, make_plan
from engine.whole_models import VOCAB, Collectives, assert_close, gradients, make_batch, make_model, shard
from harness.ranks import run_ranks
from shardwise.data.loader import Batch
from shardwise.engine.loss_head import check_loss_head, install_loss_head, loss_head_of, token_loss
from shardwise.engine.tensor_parallel import parallelize
from shardwise.spec.problems import BadInput

FAMILIES = {
    "llama": {},
    "gemma2": {},  # soft cap
    "granite": {},  # divided logits
    "cohere": {},  # multiplied logits
    "gpt2": {},  # tied
    "qwen3_moe": {"output_router_logits": True},
}
LORA = {
    "adapters": {"lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"]},
    "adapter on the head": {"target_modules": ["q_proj", "lm_head"]},
    "trained head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.fixture
def plan(tiny):
    return make_plan(make_job(tiny("llama"), fsdp={"strategy": "FULL_SHARD"}, micro_batch=3), 2)


def _with_head(model, plan, chunk=3, kind="chunked"):
    install_loss_head(model, plan.model_copy(update={"loss_head": kind, "loss_chunk": chunk}))
    return model


def _nothing_to_learn(batch):
    return Batch(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=torch.full_like(batch.labels, -100)
    )


@pytest.mark.parametrize("chunk", [1, 3, 1024])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_equal_whole_logits(plan, family, chunk):
    batch = make_batch()
    plain = gradients(make_model(family, **FAMILIES[family]), batch)
    assert_close(gradients(_with_head(make_model(family, **FAMILIES[family]), plan, chunk), batch), plain)


@pytest.mark.parametrize("lora", LORA)
def test_chunks_equal_whole_logits_with_adapters(plan, lora):
    batch = make_batch()
    plain = gradients(make_model(lora=LORA[lora]), batch)
    assert_close(gradients(_with_head(make_model(lora=LORA[lora]), plan), batch), plain)


def test_dropout_on_the_head_is_drawn_equally_again(plan):
    """One chunk draws what whole logits of the trained positions would; its recompute must draw the same."""
    batch, lora = make_batch(), {"target_modules": ["lm_head"], "lora_dropout": 0.5}
    model = _with_head(make_model(lora=lora), plan, 4)
    found = gradients(model, batch)
    weight = model.get_base_model().lm_head.lora_B["default"].weight
    step = 1e-3 * torch.randn_like(weight)
    with torch.no_grad():
        weight += step
    up = gradients(model, batch).loss
    with torch.no_grad():
        weight -= 2 * step
    down = gradients(model, batch).loss
    (name,) = [name for name in found.by_name if "lm_head.lora_B" in name]
    assert float(up - down) == pytest.approx(2 * float((found.by_name[name] * step).sum()), rel=0.02)


def test_nothing_to_learn_is_a_zero_with_gradients(plan):
    for length in (11, 4):
        found = gradients(_with_head(make_model(), plan), _nothing_to_learn(make_batch(length=length)))
        assert found.loss == 0
        assert found.by_name.keys() == {name for name, _ in make_model().named_parameters()}
        assert not any(gradient.any() for gradient in found.by_name.values())


def test_rows_of_one_token(plan):
    one = torch.tensor([[5], [6]])
    batch = Batch(input_ids=one, attention_mask=torch.ones_like(one), labels=one)
    assert token_loss(_with_head(make_model(), plan), batch) == 0


def test_logits_are_as_before(plan):
    """Outside of token_loss, and after a loss that failed."""
    batch, plain, model = make_batch(), make_model("gemma2"), _with_head(make_model("gemma2"), plan)
    bad = Batch(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels + VOCAB)
    with pytest.raises(IndexError):
        token_loss(model, bad)
    for inputs in ({}, {"labels": batch.labels}):
        expected = plain(input_ids=batch.input_ids, **inputs)
        found = model(input_ids=batch.input_ids, **inputs)
        assert torch.equal(found.logits, expected.logits)
        assert (found.loss is None) == (not inputs)
    assert list(model.state_dict()) == list(plain.state_dict())


def test_a_model_without_gradients_gives_the_loss_too(plan):
    batch, plain, model = make_batch(), make_model().eval(), _with_head(make_model().eval(), plan)
    with torch.no_grad():
        assert float(token_loss(model, batch)) == pytest.approx(float(token_loss(plain, batch)), rel=1e-6)


class _VocabularyWide(TorchDispatchMode):
    """The most rows of one result as wide as the vocabulary, and the most bytes of such results alive at once."""

    def __init__(self, model):
        super().__init__()
        self.weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.rows, self.bytes, self.alive = 0, 0, {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 and tensor.shape[-1] == VOCAB:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.weights:
                    self.rows = max(self.rows, tensor.numel() // VOCAB)
                    self.alive[StorageWeakRef(storage)] = storage.nbytes()
        self.alive = {storage: size for storage, size in self.alive.items() if not storage.expired()}
        self.bytes = max(self.bytes, sum(self.alive.values()))
        return result


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_no_more_logits_than_a_chunk_are_alive(plan, chunk):
    """Forward and backward, under a frozen head, as the gradient of a head is as wide as the vocabulary, too."""
    batch, lora = make_batch(rows=4, length=32), LORA["adapters"]
    assert batch.trained_tokens > 4 * chunk
    model = _with_head(make_model(lora=lora), plan, chunk)
    with _VocabularyWide(model) as seen:
        token_loss(model, batch).backward()
    assert seen.rows == chunk
    assert seen.bytes <= 4 * chunk * VOCAB * 4

    model = make_model(lora=lora)
    with _VocabularyWide(model) as seen:
        token_loss(model, batch).backward()
    assert seen.rows == 4 * 32


def _own_units(model, how):
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    return {
        "root": [],
        "own unit": [causal.get_output_embeddings()],
        "with embedding": [[causal.get_input_embeddings(), causal.get_output_embeddings()]],
    }[how]


CASES = {
    "root": ("llama", None, "root"),
    "own unit": ("llama", None, "own unit"),
    "own unit, soft cap": ("gemma2", None, "with embedding"),
    "tied in root": ("gpt2", None, "root"),
    "tied, own unit": ("gpt2", None, "with embedding"),
    "scaled": ("granite", None, "root"),
    "multiplied": ("cohere", None, "root"),
    "adapters": ("llama", "adapters", "root"),
    "adapters, own unit": ("llama", "adapters", "own unit"),
    "adapter on the head": ("llama", "adapter on the head", "own unit"),
    "trained head": ("llama", "trained head", "root"),
    "trained head, own unit": ("llama", "trained head", "own unit"),
}


def _on_ranks(rank, world, plan, case, chunk, policy=None, empty=None):
    family, lora, how = CASES[case]
    batch = make_batch(seed=rank)
    if rank == empty:
        batch = _nothing_to_learn(batch)
    model = make_model(family, lora=lora and LORA[lora])
    if chunk is not None:
        _with_head(model, plan, chunk)
    shard(model, own=_own_units(model, how), policy=policy)
    with Collectives() as collectives:
        found = gradients(model, batch)
    return found, collectives.counted


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_whole_logits(plan, case):
    def body(rank, world):
        return [_on_ranks(rank, world, plan, case, chunk) for chunk in (None, 1, 3, 1024)]

    for (plain, collectives), *others in run_ranks(body, 2):
        assert collectives.total() > 0
        for found, counts in others:
            assert_close(found, plain)
            assert counts == collectives, "the unit of the head is gathered and reduced once"


@pytest.mark.parametrize("case", ["root", "own unit", "tied in root", "adapters"])
def test_a_rank_without_labels_runs_the_same_collectives(plan, case):
    def body(rank, world):
        return [_on_ranks(rank, world, plan, case, chunk, empty=1) for chunk in (None, 3)]

    results = run_ranks(body, 2)
    assert [found.loss for found, _ in results[1]] == [0, 0]
    for (plain, collectives), (found, counts) in results:
        assert counts == collectives
        for name, gradient in plain.by_name.items():
            torch.testing.assert_close(found.by_name[name], gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["root", "own unit", "adapters"])
def test_bf16_weights_give_an_fp32_loss(plan, case):
    """Logits in bf16 are the same numbers; gradients of the head are added up over chunks in bf16."""

    def body(rank, world):
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
        return [_on_ranks(rank, world, plan, case, chunk, policy)[0] for chunk in (None, 3)]

    for plain, found in run_ranks(body, 2):
        assert found.loss.dtype == torch.float32
        assert_close(found, plain, 1e-2)
        assert abs(found.loss - plain.loss) <= 1e-6 * plain.loss


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_head_that_tensor_parallelism_splits(plan, sequence_parallel):
    """Chunks of whole logits from a head split by the vocabulary, of which each rank holds half."""
    options = {"vocab_size": VOCAB + 1, "num_key_value_heads": 2}
    batch = make_batch(length=12)

    def body(rank, world):
        model = _with_head(make_model(**options), plan)
        parallelize(model, init_device_mesh("cpu", (world,)), sequence_parallel=sequence_parallel)
        found = gradients(model, batch)
        assert model.lm_head.weight.to_local().shape[0] == (VOCAB + 1) // 2
        return found

    alone = gradients(make_model(**options), batch)
    for found in run_ranks(body, 2):
        if sequence_parallel:  # norms see a part of the sequence each; their gradients are added up when sharded
            found.by_name = {name: g for name, g in found.by_name.items() if "norm" not in name}
            alone.by_name = {name: g for name, g in alone.by_name.items() if "norm" not in name}
        assert_close(found, alone, 5e-6)


def test_what_is_installed_is_read_back(plan):
    assert loss_head_of(make_model()) == "eager"
    assert loss_head_of(_with_head(make_model(), plan, kind="eager")) == "eager"
    assert loss_head_of(_with_head(make_model(lora={}), plan)) == "chunked"
    assert loss_head_of(_with_head(make_model(), plan, kind="fused")) == "fused"


def _problem(call, *args, **kwargs):
    with pytest.raises(BadInput) as caught:
        call(*args, **kwargs)
    (problem,) = caught.value.problems
    return problem


class _Nested(nn.Module):
    """A head inside another module."""

    base_model_prefix = "model"

    def __init__(self):
        super().__init__()
        self.model, self.tail = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))

    def get_output_embeddings(self):
        return self.tail[0]


def test_models_that_cannot_be_taken_apart_are_refused(plan):
    problem = _problem(_with_head, _Nested(), plan)
    assert (problem.field, problem.value, problem.allowed) == ("loss_head", "chunked", "eager")
    assert "_Nested" in problem.reason
    with torch.device("meta"):
        opt = make_model("opt")
    problem = _problem(_with_head, opt, plan)
    assert "OPTForCausalLM needs more than its decoder's output" in problem.reason
    assert "eager" in problem.fix


def test_what_the_fused_kernel_does_not_know_is_refused(plan):
    for family in ("granite", "cohere"):
        problem = _problem(_with_head, make_model(family), plan, kind="fused")
        assert problem.allowed == "eager, chunked"
        assert "changes its logits" in problem.reason
    for lora in ("adapter on the head", "trained head"):
        problem = _problem(_with_head, make_model(lora=LORA[lora]), plan, kind="fused")
        assert "not a plain linear layer" in problem.reason
        assert "chunked" in problem.fix


def test_what_cannot_run_here_is_refused_before_any_rank_starts(plan, monkeypatch):
    def planned(**fields):
        return plan.model_copy(update=fields)

    for kind, device in (("eager", "cpu"), ("chunked", "cpu"), ("chunked", "cuda")):
        check_loss_head(planned(loss_head=kind), device)
    problem = _problem(check_loss_head, planned(loss_head="fused"), "cpu")
    assert (problem.field, problem.value, problem.allowed) == ("loss_head", "fused", "eager, chunked")
    assert "GPUs only" in problem.reason
    assert "chunked" in problem.fix

    found = {"liger_kernel": None}
    monkeypatch.setattr(importlib.util, "find_spec", found.get)
    problem = _problem(check_loss_head, planned(loss_head="fused"), "cuda")
    assert problem.fix == "pip install 'shardwise[liger]'"
    found["liger_kernel"] = importlib.machinery.ModuleSpec("liger_kernel", None)
    check_loss_head(planned(loss_head="fused"), "cuda")

    split = plan.mesh.model_copy(update={"tensor": 2})
    assert "mesh.tensor" in _problem(check_loss_head, planned(loss_head="fused", mesh=split), "cuda").reason
    low = plan.dtypes.model_copy(update={"output": "bf16"})
    problem = _problem(check_loss_head, planned(loss_head="chunked", dtypes=low), "cpu")
    assert (problem.field, problem.value, problem.allowed) == ("mixed_precision.output_dtype", "bf16", "fp32")


class _Kernel:
    """What the call of Liger's kernel means, written out."""

    def __init__(self, *, ignore_index, reduction, softcap):
        assert (ignore_index, reduction) == (-100, "sum")
        self.softcap = softcap

    def __call__(self, weight, hidden, target, bias):
        assert len(hidden) > 0
        logits = F.linear(hidden, weight, bias).float()
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return F.cross_entropy(logits, target, reduction="sum")


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_the_fused_kernel_is_given_what_it_needs(plan, monkeypatch, family):
    """The kernel itself runs on GPUs only; its place is taken by a plain product here."""
    liger = ModuleType("liger_kernel.transformers")
    liger.LigerFusedLinearCrossEntropyLoss = _Kernel
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    for batch in (make_batch(), _nothing_to_learn(make_batch())):
        found = gradients(_with_head(make_model(family), plan, kind="fused"), batch)
        assert_close(found, gradients(make_model(family), batch))
