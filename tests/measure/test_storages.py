"""The tracker follows every storage from birth to death, knows what each is for, and leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from engine.training import backward, one_process_model
from harness.ranks import run_ranks
from measure.live_storages import prepare, rows_of, tracked, wide_job
from shardwise.engine.compat import UnsupportedRelease
from shardwise.engine.compat_fake import FakeTensors, fake_group
from shardwise.engine.compat_memory import plain_tensors, watch_propagation, watch_units
from shardwise.measure.storages import StorageTracker, peaks


def live(tracker: StorageTracker) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for piece, change in tracker.log.sizes():
        sizes[piece.category] = sizes.get(piece.category, 0) + change
    return {category: size for category, size in sizes.items() if size}


@pytest.fixture(params=["real", "fake"])
def ambient(request):
    """Run a test on real tensors and in a FakeTensorMode."""
    if request.param == "real":
        yield
        return
    with FakeTensors():
        yield


def test_births_deaths_views_and_operations_in_place(ambient):
    with StorageTracker() as tracker:
        first = torch.zeros(7, 3)
        assert live(tracker) == {"temporaries": 84}
        view, second = first.t()[1], first + 1
        view.add_(2.0)
        assert live(tracker) == {"temporaries": 168}
        del first
        assert live(tracker) == {"temporaries": 168}, "the view holds the memory"
        del view
        assert live(tracker) == {"temporaries": 84}
        del second
        assert live(tracker) == {}
    (segment,) = tracker.segments()
    assert dict(segment.peak) == {"temporaries": 168}
    assert dict(segment.end) == {"temporaries": 0}


def test_resized_storages(ambient):
    with StorageTracker() as tracker:
        tensor = torch.zeros(50)
        tensor.untyped_storage().resize_(0)
        assert live(tracker) == {}
        tensor.untyped_storage().resize_(200)
        other = torch.zeros(1)
        torch.add(torch.zeros(9), 1, out=other)
        assert live(tracker) == {"temporaries": 200 + 36}
    assert "resize_" not in vars(torch.UntypedStorage)


def test_the_peak_is_inside_and_counts_what_a_category_becomes_known_for(ambient):
    with StorageTracker() as tracker:
        kept = torch.zeros(10)
        short = torch.zeros(100)
        del short
        tracker.add([kept], "activations")
    (instant,) = peaks(tracker.segments())
    assert dict(instant.live) == {"activations": 40, "temporaries": 400}
    largest = tracker.largest()
    assert (largest.bytes, largest.category, largest.where) == (400, "temporaries", "root")


def test_a_storage_can_turn_into_something_else(ambient):
    with StorageTracker() as tracker:
        kept = torch.zeros(10)
        tracker.turn([kept], "offloaded")
        assert live(tracker) == {"offloaded": 40}
        with tracker.births("offloaded"):
            more = torch.zeros(5)
        piece = tracker.stand_in(1000, "temporaries", "scratch")
        tracker.drop(piece)
        assert live(tracker) == {"offloaded": 60}
        del kept, more
        assert live(tracker) == {}
    (instant,) = peaks(tracker.segments())
    assert instant.allocated == 1000, "what is offloaded is not on the device"
    assert dict(instant.live) == {"temporaries": 1000, "offloaded": 60}


def test_phases_that_the_caller_names():
    with StorageTracker() as tracker:
        with tracker.phase("load"):
            kept = torch.zeros(10)
        with tracker.phase("save"):
            copy = kept.clone()
        del copy
    found = {instant.phase: instant.allocated for instant in peaks(tracker.segments())}
    assert found == {"load": 40, "forward": 80, "save": 80}


def test_memory_that_torch_did_not_allocate_does_not_count(tmp_path):
    mapped = torch.UntypedStorage.from_file(str(tmp_path / "file"), shared=True, nbytes=400)
    with StorageTracker() as tracker:
        looked_at = torch.empty(0).set_(mapped).view(-1)
        assert looked_at.numel() == 400 // 4
        assert live(tracker) == {}
        tracker.add([torch.empty(0, device="meta"), torch.empty(99, device="meta")], "inputs")
        assert live(tracker) == {}


def test_storages_elsewhere_count_only_as_offloaded():
    here = torch.zeros(10)
    with StorageTracker(device_type="cuda") as tracker:
        other = here + 1
        tracker.add([here, other], "inputs")
        assert live(tracker) == {}
        tracker.add([here], "offloaded")
        assert live(tracker) == {"offloaded": 40}


@pytest.mark.parametrize("fake", [False, True])
def test_shapes_that_dtensor_finds_out_do_not_count(fake):
    """The foreach optimizer in fake mode: shards and states of 1 / 8, none of the global shape."""
    with fake_group(8):
        mesh = init_device_mesh("cpu", (8,))
        tensors = FakeTensors() if fake else torch.enable_grad()
        with tensors:
            shards = [distribute_tensor(torch.zeros(64, 31), mesh, [Shard(0)], src_data_rank=None) for _ in range(3)]
            parameters = [nn.Parameter(shard) for shard in shards]
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer = torch.optim.AdamW(parameters, foreach=True)
            with StorageTracker(None, optimizer) as tracker:
                tracker.add(parameters, "sharded_parameters")
                optimizer.step()
                tracker.add([state["step"] for state in optimizer.state.values()], "buffers")
    shard = 64 * 31 * 4 // 8
    assert live(tracker) == {"sharded_parameters": 3 * shard, "optimizer_states": 6 * shard, "buffers": 12}
    assert max(instant.allocated for instant in peaks(tracker.segments())) < 14 * shard


def test_subclasses_of_several_storages_are_taken_apart():
    optim = pytest.importorskip("torchao.optim.subclass_8bit")
    state = optim.OptimState8bit.zeros((64, 32), signed=True, block_size=256)
    assert [part.numel() * part.element_size() for part in plain_tensors(state)] == [2048, 32, 1024]
    with StorageTracker() as tracker:
        tracker.add([state], "optimizer_states")
        assert live(tracker) == {"optimizer_states": 2048 + 32 + 1024}


def _hooks(run) -> dict[str, int]:
    modules = list(run.model.modules())
    leaves = [
        param._unsharded_param
        for module in modules
        if hasattr(module, "_get_fsdp_state")
        for group in module._get_fsdp_state()._fsdp_param_groups
        for param in group.fsdp_params
    ]
    return {
        "forward": sum(len(module._forward_hooks) for module in modules),
        "before forward": sum(len(module._forward_pre_hooks) for module in modules),
        "gradients": sum(len(leaf._post_accumulate_grad_hooks or ()) for leaf in leaves),
        "optimizer": len(run.optimizer._optimizer_step_pre_hooks) + len(run.optimizer._optimizer_step_post_hooks),
    }


def _installed() -> list[object]:
    group, param = _fsdp_param_group.FSDPParamGroup, _fsdp_param.FSDPParam
    return [
        *(getattr(group, name) for name in ("unshard", "wait_for_unshard", "reshard", "post_backward")),
        param.init_all_gather_outputs,
        _fsdp_param_group.foreach_reduce,
        ShardingPropagator._propagate_tensor_meta_non_cached,
        torch.UntypedStorage.resize_,
    ]


def leaves_nothing(rank: int, world: int, job) -> bool:
    run = prepare(rank, world, job)
    run.step()
    before = (_hooks(run), _installed())
    with tracked(run) as tracker:
        during = _hooks(run)
        run.step()
    assert all(during[kind] > count for kind, count in before[0].items()), during
    assert (_hooks(run), _installed()) == before
    events = sum(1 for _ in tracker.log.sizes())
    run.step()
    assert sum(1 for _ in tracker.log.sizes()) == events, "nothing is noted any more"
    with pytest.raises(ZeroDivisionError), tracked(run):
        raise ZeroDivisionError
    assert (_hooks(run), _installed()) == before
    return True


def test_nothing_stays_installed(tiny):
    job = wide_job(tiny, activation_checkpointing="full", units={"embedding": "own"})
    assert all(run_ranks(leaves_nothing, 2, job))


def test_a_release_without_what_is_watched_is_refused(monkeypatch):
    monkeypatch.delattr(_fsdp_param_group, "foreach_reduce")
    with pytest.raises(UnsupportedRelease, match="foreach_reduce"), watch_units(lambda *_: None):
        pass
    monkeypatch.delattr(ShardingPropagator, "_propagate_tensor_meta_non_cached")
    with pytest.raises(UnsupportedRelease, match="_propagate_tensor_meta_non_cached"), watch_propagation(lambda: None):
        pass


def test_a_model_that_is_not_sharded(tiny):
    job = wide_job(tiny)
    model = one_process_model(job)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    (batch,) = rows_of(2, 1, seed=0)
    with StorageTracker(model, optimizer) as tracker:
        tracker.add([batch.input_ids, batch.attention_mask, batch.labels], "inputs")
        backward(model, batch, 10.0)
        optimizer.step()
    weights = sum(p.numel() for p in model.parameters()) * 4
    found = {instant.phase: dict(instant.live) for instant in peaks(tracker.segments())}
    assert {*found["backward"]} <= {
        *("sharded_parameters", "sharded_gradients", "activations", "logits_and_loss", "temporaries"),
        *("buffers", "inputs"),
    }
    assert found["forward"]["activations"] > 0
    assert found["forward"]["sharded_parameters"] == found["optimizer_step"]["sharded_gradients"] == weights
    states = found["optimizer_step"]["optimizer_states"]
    assert states == pytest.approx(2 * weights, abs=1024)
