"""What blocks save goes to the host and comes back: the right bytes, once, and the same gradients."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from engine.whole_models import Collectives, assert_equal, gradients, make_batch, make_model, shard
from harness.ranks import run_ranks
from shardwise.engine import activation_offload, checkpointing
from shardwise.engine.activation_offload import SMALLEST, activation_offload_of, offload_activations
from shardwise.engine.blocks import find_blocks
from shardwise.engine.checkpointing import wrap_blocks
from shardwise.engine.compat import is_view_of_parameter
from shardwise.engine.loss_head import token_loss

LAYERS, ROWS, LENGTH, HIDDEN = 3, 2, 11, 64
SETTINGS = ["none", "full", "every_2", "selective"]


def _model(setting, family="llama", **options):
    model = make_model(family, **{"num_hidden_layers": LAYERS, **options})
    wrap_blocks(find_blocks(model).modules, setting)
    return model


def _offloaded(setting, family="llama", **options):
    model = _model(setting, family, **options)
    offload_activations(find_blocks(model).modules)
    return model


def _packed(model):
    (offload,) = {activation_offload_of(block) for block in find_blocks(model).modules}
    return offload.bytes_packed


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"lora": {"lora_dropout": 0.3}}),
        ("llama", {"dtype": torch.bfloat16}),
        ("gpt2", {"n_layer": LAYERS, "lora": {}}),
        ("qwen3_moe", {}),
    ],
)
def test_gradients_are_the_same(family, options, setting):
    batch = make_batch()
    model = _offloaded(setting, family, **options)
    assert_equal(gradients(model, batch), gradients(_model(setting, family, **options), batch))
    first = _packed(model)
    assert first > 0
    gradients(model, batch)
    assert _packed(model) == 2 * first, "a step packs what the step before packed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_full_checkpointing_the_blocks_inputs_go(dtype):
    model = _offloaded("full", dtype=dtype)
    gradients(model, make_batch(rows=ROWS, length=LENGTH))
    assert _packed(model) == ROWS * LENGTH * HIDDEN * dtype.itemsize * LAYERS
    without = _offloaded("none", dtype=dtype)
    gradients(without, make_batch(rows=ROWS, length=LENGTH))
    assert _packed(without) > 5 * _packed(model)


@pytest.mark.parametrize(("family", "options"), [("llama", {}), ("llama", {"lora": {}}), ("qwen3_moe", {})])
def test_every_storage_goes_once_and_no_weight(monkeypatch, family, options):
    """Without checkpointing, against an own count of what autograd saves in blocks."""
    batch = make_batch()
    model = _offloaded("none", family, **options)
    gradients(model, batch)

    plain = _model("none", family, **options)
    kept, weights = {}, {p.untyped_storage().data_ptr() for p in plain.parameters()}
    shared = set()

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights | shared and storage.nbytes() >= SMALLEST:
            kept[storage.data_ptr()] = tensor  # alive, so that no address is used twice
        return tensor

    class Around:
        def __init__(self, block):
            block.register_forward_pre_hook(self.enter, with_kwargs=True)
            block.register_forward_hook(self.leave)

        def enter(self, block, args, kwargs):
            shared.update(t.untyped_storage().data_ptr() for t in kwargs["position_embeddings"])
            if kwargs["attention_mask"] is not None:
                shared.add(kwargs["attention_mask"].untyped_storage().data_ptr())
            self.hooks = saved_tensors_hooks(note, lambda tensor: tensor)
            self.hooks.__enter__()

        def leave(self, block, args, output):
            self.hooks.__exit__()

    for block in find_blocks(plain).modules:
        Around(block)
    gradients(plain, batch)
    assert _packed(model) == sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_small_storages_stay(monkeypatch):
    monkeypatch.setattr(activation_offload, "SMALLEST", ROWS * LENGTH * HIDDEN * 4 + 1)
    model = _offloaded("full")
    gradients(model, make_batch(rows=ROWS, length=LENGTH))
    assert _packed(model) == 0


def test_nothing_is_packed_without_gradients_or_after_an_error():
    model, batch = _offloaded("none"), make_batch()
    with torch.no_grad():
        model(input_ids=batch.input_ids, use_cache=False)
    assert _packed(model) == 0
    with pytest.raises(RuntimeError):
        find_blocks(model).modules[0](torch.zeros(1, 1, HIDDEN + 1))
    weight = nn.Parameter(torch.ones(SMALLEST))
    (weight * torch.ones(SMALLEST)).sum().backward()
    before = _packed(model)
    gradients(model, batch)
    assert before < _packed(model)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("setting", ["none", "full"])
def test_a_graph_can_be_walked_twice(monkeypatch, setting, late):
    if late:
        monkeypatch.setattr(activation_offload, "side_stream", _LateStream)
    model, batch = _offloaded(setting), make_batch()
    loss = token_loss(model, batch)
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    loss.backward()
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, 2 * once[name]), name


class _LateStream:
    """A GPU's side stream on a CPU, as late as can be: a copy is made only when somebody waits for it.

    What the device gave up before then is not copied from, and not written to but counted: on a GPU the computation
    would have used that memory for something else.
    """

    def __init__(self, device):
        self.waiting, self.done, self.written_over = [], 0, 0

    def to_host(self, there):
        host = torch.full_like(there, 0x7F)
        source = weakref.ref(there)

        def copy():
            if source() is not None:
                host.copy_(source())

        self.waiting.append(copy)
        return host

    def from_host(self, hosts):
        return [self._back(host) for host in hosts]

    def _back(self, host):
        there = torch.full_like(host, 0x7F)
        target = weakref.ref(there)

        def back():
            if target() is None:
                self.written_over += 1
            else:
                target().copy_(host)

        self.waiting.append(back)
        return there

    def mark(self):
        return self.done + len(self.waiting)

    def wait(self, event):
        while self.done < event:
            self.waiting.pop(0)()
            self.done += 1


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("options", [{}, {"lora": {"lora_dropout": 0.3}}])
def test_nothing_is_used_before_it_has_arrived(monkeypatch, options, setting):
    """The order of copies, waits and releases that a GPU gets; the copies themselves are made on a CPU."""
    monkeypatch.setattr(activation_offload, "side_stream", _LateStream)
    batch = make_batch()
    model, plain = _offloaded(setting, **options), _model(setting, **options)
    offload = activation_offload_of(find_blocks(model).modules[0])
    for _ in range(2):
        assert_equal(gradients(model, batch), gradients(plain, batch))
        assert offload.ahead is None
    assert offload.side.done > 0
    assert offload.side.written_over == 0


def test_the_device_holds_two_blocks_at_most(monkeypatch):
    monkeypatch.setattr(activation_offload, "side_stream", _LateStream)
    model, batch = _offloaded("none", num_hidden_layers=5), make_batch()
    trips, forward, backward = [], [], []
    begin, ask = activation_offload.ActivationOffload.begin, activation_offload._Trip.ask

    def here():
        return sum(any(cargo.there is not None for cargo in trip.cargo.values()) for trip in trips)

    def noted_begin(self, stays):
        trips.append(begin(self, stays))
        forward.append(here())
        return trips[-1]

    def noted_ask(self):
        ask(self)
        backward.append(here())

    monkeypatch.setattr(activation_offload.ActivationOffload, "begin", noted_begin)
    monkeypatch.setattr(activation_offload._Trip, "ask", noted_ask)
    gradients(model, batch)
    assert max(forward) == 1
    assert max(backward) == 2
    assert here() == 0


def test_a_graph_that_is_given_up_goes():
    model, batch, trips = _offloaded("none"), make_batch(), []
    offload = activation_offload_of(find_blocks(model).modules[0])
    for block in find_blocks(model).modules:
        block.register_forward_pre_hook(lambda *_: trips.append(offload.last))
    loss = token_loss(model, batch)
    assert [trip() is None for trip in trips] == [False] * LAYERS
    del loss
    assert [trip() is None for trip in trips] == [True] * LAYERS


def test_a_fetch_that_nobody_asked_for_is_waited_for(monkeypatch):
    monkeypatch.setattr(activation_offload, "side_stream", _LateStream)
    model, batch = _offloaded("none"), make_batch()
    offload = activation_offload_of(find_blocks(model).modules[0])
    hidden = []
    handle = find_blocks(model).modules[-1].register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    loss = token_loss(model, batch)
    torch.autograd.grad(loss, hidden[0])
    assert offload.ahead is not None
    assert offload.side.waiting
    handle.remove()
    hidden.clear()
    del loss
    model(input_ids=batch.input_ids, use_cache=False)
    assert offload.ahead is None
    assert not [copy for copy in offload.side.waiting if copy.__name__ == "back"]
    assert offload.side.written_over == 0


def test_names_and_classes_stay():
    plain, model = _model("full"), _offloaded("full")
    assert list(plain.state_dict()) == list(model.state_dict())
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert [type(block) for block in plain.modules()] == [type(block) for block in model.modules()]
    assert {activation_offload_of(block) for block in find_blocks(plain).modules} == {None}


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_on_two_ranks_weights_are_gathered_and_freed_as_before(strategy):
    def body(rank, world):
        checkpointing.CHEAP_INNER = 40
        results = []
        for make in (_model, _offloaded):
            for setting in ("none", "full", "selective"):
                model, batch = shard(make(setting), strategy=strategy), make_batch(seed=rank)
                with Collectives() as collectives:
                    found = gradients(model, batch)
                counts = collectives.counted
                results.append((found, counts, _packed(model) if make is _offloaded else None))
        return results

    for results in run_ranks(body, 2):
        half = len(results) // 2
        for (plain, collectives, _), (found, counts, _) in zip(results[:half], results[half:], strict=True):
            assert_equal(found, plain)
            assert counts == collectives
            assert counts.total() > 0
        alone = [_offloaded(setting) for setting in ("none", "full", "selective")]
        for model in alone:
            gradients(model, make_batch())
        assert [packed for *_, packed in results[half:]] == [_packed(model) for model in alone], "gathered weights went"


def test_views_of_parameters_are_known():
    linear = nn.Linear(3, 4)
    assert is_view_of_parameter(linear.weight)
    assert is_view_of_parameter(linear.weight.t()[:2])
    assert not is_view_of_parameter(linear(torch.ones(2, 3)).t())
