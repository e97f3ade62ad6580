from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from predict.traced import A10, CPUS, H100, plan, workload
from shardwise.catalogue.cards import find_gpu
from shardwise.engine import loss_head
from shardwise.engine.compat_fake import FakeTensors
from shardwise.measure.storages import StorageTracker
from shardwise.predict.attention_kernels import Attention, scratch_bytes
from shardwise.predict.shims import SHIMS, as_on, shims_of
from shardwise.predict.trace import trace
from shardwise.predict.workspace import workspace_bytes
from shardwise.spec.layout import Offload

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS, HEADS, LENGTH, WIDTH = 2, 6, 37, 16
HIDDEN = ROWS * HEADS * LENGTH * WIDTH


@contextmanager
def on(cluster, *names):
    """Fake tensors in which only these shims are at work."""
    tensors, tracker = FakeTensors(), StorageTracker()
    shims = [shim for shim in SHIMS if shim.name in names]
    assert len(shims) == len(names)
    with tensors, tracker, as_on(cluster, shims, tensors=tensors, tracker=tracker):
        yield tracker


def saved_bytes(compute):
    """Bytes that autograd keeps of one computation, each storage once."""
    kept = {}

    def pack(tensor):
        kept[id(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = compute()
    return sum(kept.values()), result


def heads(count, dtype=BF16, width=WIDTH):
    """Queries or keys [rows, heads, length, width] as projections make them."""
    return torch.zeros(ROWS, LENGTH, count, width, dtype=dtype, requires_grad=True).transpose(1, 2)


def test_every_shim_says_what_it_changes_and_where_that_is_from():
    assert all(shim.changes and shim.source for shim in SHIMS)
    assert len({shim.name for shim in SHIMS}) == len(SHIMS)


def test_cpus_have_none():
    assert shims_of(plan(offload=Offload(activations=True)), CPUS) == ()
    assert "temporaries" not in trace(workload(layers=2), plan(), CPUS).footprint.of_phase("save").live


def test_plans_have_those_that_concern_them():
    def names(how):
        return {shim.name for shim in shims_of(how, A10)}

    plain = names(plan())
    assert names(plan(offload=Offload(optimizer=True))) - plain == {"offloaded optimizer states"}
    assert names(plan(offload=Offload(parameters=True))) - plain == {"offloaded shards"}
    assert names(plan(offload=Offload(activations=True))) - plain == {"offloaded activations"}
    assert names(plan(loss_head="fused")) - plain == {"fused loss head"}
    assert trace(workload(layers=2), plan(loss_head="fused"), A10).footprint.of_phase("forward")


@pytest.mark.parametrize(
    ("generation", "dtype", "heads_of_keys", "width", "masked", "kernel"),
    [
        ("ampere", BF16, 2, 64, False, "flash"),
        ("ampere", BF16, 6, 64, True, "efficient"),
        ("ampere", BF16, 2, 64, True, "math"),
        ("ampere", FP32, 6, 64, False, "efficient"),
        ("ampere", FP32, 2, 64, False, "math"),
        ("ampere", BF16, 6, 264, False, "efficient"),
        ("hopper", BF16, 2, 64, False, "cudnn"),
        ("hopper", BF16, 6, 64, True, "cudnn"),
        ("hopper", BF16, 6, 60, False, "flash"),
        ("hopper", FP32, 6, 64, False, "efficient"),
        ("volta", FP16, 6, 64, False, "efficient"),
        ("volta", BF16, 6, 64, False, "math"),
    ],
)
def test_the_kernel_is_the_one_that_torch_takes(generation, dtype, heads_of_keys, width, masked, kernel):
    with FakeTensors():
        query, key = heads(HEADS, dtype, width), heads(heads_of_keys, dtype, width)
        mask = torch.ones(ROWS, 1, LENGTH, LENGTH, dtype=torch.bool) if masked else None
        assert Attention(generation=generation).kernel(query, key, key, mask) == kernel


@pytest.mark.parametrize("cluster", [A10, H100])
def test_a_fused_kernel_keeps_queries_keys_values_output_and_a_number_a_query(cluster):
    with on(cluster, "attention kernels"):
        query, key, value = heads(HEADS), heads(2), heads(2)
        kept, output = saved_bytes(
            lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        )
    numbers = ROWS * HEADS * LENGTH * 4
    assert output.shape == query.shape
    assert kept == pytest.approx(2 * (2 * HIDDEN + 2 * HIDDEN // 3) + numbers, abs=64)


def test_a_mask_is_kept_in_the_dtype_of_the_queries_with_its_rows_aligned():
    with on(A10, "attention kernels"):
        query, mask = heads(HEADS), torch.ones(ROWS, 1, LENGTH, LENGTH, dtype=torch.bool)
        plain, _ = saved_bytes(lambda: F.scaled_dot_product_attention(query, query, query))
        masked, _ = saved_bytes(lambda: F.scaled_dot_product_attention(query, query, query, attn_mask=mask))
    # The memory-efficient kernel rounds its fp32 numbers up to 32 queries.
    assert masked - plain == pytest.approx(ROWS * LENGTH * 48 * 2 + ROWS * HEADS * (64 - LENGTH) * 4, abs=16)


def test_the_backward_of_attention_takes_memory_while_it_runs():
    def highest(*names):
        with on(A10, *names) as tracker:
            query, key, value = heads(HEADS), heads(2), heads(2)
            F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).sum().backward()
        return max(segment.instant.allocated for segment in tracker.segments())

    scratch = ROWS * HEADS * 128 * (32 + 1) * 4 + 2 * ROWS * LENGTH * HEADS * WIDTH * 2
    with FakeTensors():
        assert scratch_bytes("flash", (None, heads(HEADS), heads(2), heads(2))) == scratch
    taken = highest("attention kernels", "attention backward") - highest("attention kernels")
    assert 0.9 * scratch < taken <= scratch


def test_a_fused_rms_norm_keeps_its_input_and_a_number_a_row():
    def kept(*names):
        with on(A10, *names):
            given, weight = (
                torch.zeros(5, 96, dtype=BF16, requires_grad=True),
                torch.ones(96, dtype=BF16, requires_grad=True),
            )
            size, output = saved_bytes(lambda: F.rms_norm(given, (96,), weight))
            output.sum().backward()
            assert (given.grad.shape, weight.grad.dtype) == (given.shape, BF16)
        return size

    assert kept("RMS norm") == 5 * 96 * 2 + 96 * 2 + 5 * 4
    assert kept() > 2.5 * kept("RMS norm")


def test_dropout_keeps_a_byte_an_element():
    def kept(*names):
        with on(A10, *names):
            given = torch.zeros(5, 96, dtype=BF16, requires_grad=True)
            return saved_bytes(lambda: F.dropout(given, 0.1))[0]

    assert (kept("dropout"), kept()) == (5 * 96, 2 * 5 * 96)


def test_a_layer_norm_keeps_its_statistics_in_fp32():
    def kept(*names):
        with on(A10, *names):
            given = torch.zeros(5, 96, dtype=BF16, requires_grad=True)
            size, output = saved_bytes(lambda: F.layer_norm(given, (96,)))
            output.sum().backward()
        return size

    assert kept("layer norm") - kept() == 2 * 5 * 2


def test_matrix_products_have_their_workspace():
    assert workspace_bytes(find_gpu("A10")) == 8_519_680
    assert workspace_bytes(find_gpu("H100-SXM-80GB")) == 32 * 2**20
    work, how = workload(layers=2), plan()
    cpus, gpus = (trace(work, how, cluster).footprint.of_phase("save") for cluster in (CPUS, A10))
    assert gpus.allocated - cpus.allocated == 2 * 8_519_680


def test_a_fused_loss_head_makes_no_whole_logits():
    tokens, vocab, width = 4094, 1009, 96
    with on(A10, "fused loss head") as tracker:
        hidden = torch.zeros(tokens, width, dtype=BF16, requires_grad=True)
        head = SimpleNamespace(weight=torch.zeros(vocab, width, dtype=BF16, requires_grad=True))
        installed = SimpleNamespace(parts=SimpleNamespace(head=head))
        kept, loss = saved_bytes(lambda: loss_head.fused_loss(installed, None, hidden, None))
        loss.backward()
        assert (hidden.grad.shape, head.weight.grad.shape, loss.dtype) == (hidden.shape, head.weight.shape, FP32)
    given = made = 2 * (tokens + vocab) * width
    assert kept == made
    # 1009 / 96 is 11 pieces of 373 tokens, rounded up to 512, and a loss for each token.
    assert max(s.instant.allocated for s in tracker.segments()) == given + made + 2 * 512 * vocab + 4 * tokens


def test_offloaded_states_come_for_the_update():
    kept, away = (
        trace(workload(layers=2), plan(offload=Offload(optimizer=given)), A10).footprint.of_phase("optimizer_step")
        for given in (False, True)
    )
    assert away.live["offloaded"] == kept.live["optimizer_states"]
    assert away.live.get("optimizer_states", 0) == 0
    assert away.live["temporaries"] - kept.live["temporaries"] == pytest.approx(away.live["offloaded"], rel=0.01)


def test_offloaded_shards_are_no_memory_of_the_card():
    footprint = trace(workload(layers=2), plan(offload=Offload(parameters=True)), A10).footprint
    assert footprint.of_phase("save").live["temporaries"] == 2 * 8_519_680
    assert footprint.of_phase("save").allocated - 2 * 8_519_680 == footprint.of_phase("load").live["buffers"]
    assert "sharded_gradients" not in footprint.of_phase("backward").live


def test_offloaded_activations_leave_all_but_two_blocks_on_the_host():
    kept, away = (
        trace(
            workload(layers=5), plan(activation_checkpointing="none", offload=Offload(activations=given)), A10
        ).footprint.of_phase("forward")
        for given in (False, True)
    )
    assert away.live["activations"] < kept.live["activations"] / 2
    assert away.live["offloaded"] > kept.live["activations"] / 2
