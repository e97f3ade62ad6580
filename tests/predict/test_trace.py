import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers.utils import import_utils

from predict.traced import A10, CPUS, LATENT, LORA, MIXTURE, at_full_depth, dtypes, plan, workload
from shardwise.engine.compat_fake import fake_group
from shardwise.measure.storages import peaks
from shardwise.predict import trace_run
from shardwise.predict.trace import trace
from shardwise.spec.footprint import PHASES
from shardwise.spec.layout import Mesh, ReduceScatter
from shardwise.spec.problems import BadInput

ROWS, LENGTH, VOCAB = 2, 37, 1009


def by_phase(observed):
    return {i.phase: {c: size for c, size in i.live.items() if size} for i in peaks(observed.segments)}


def test_what_lies_at_rest_is_what_the_plan_says():
    report = trace(workload(layers=2), plan(), CPUS)
    assert report.instrument == "trace"
    assert [instant.phase for instant in report.footprint.peaks] == list(PHASES)
    shards = sum(
        -(-shape[0] // 8) * (shape[1] if len(shape) > 1 else 1)
        for shape in (
            [(VOCAB, 96), (VOCAB, 96), (96,)]
            + 2 * [(96, 96), (32, 96), (32, 96), (96, 96), (176, 96), (176, 96), (96, 176), (96,), (96,)]
        )
    )
    saved = report.footprint.of_phase("save").live
    assert saved["sharded_parameters"] == saved["sharded_gradients"] == 4 * shards
    counters = 4 * 21
    assert saved["optimizer_states"] == 8 * shards + counters
    assert report.footprint.of_phase("load").live["sharded_parameters"] == 4 * shards


def test_logits_of_an_eager_head_cost_twelve_bytes_each():
    """In fp32, once more without the last position, and their logarithms of probabilities."""
    footprint = trace(workload(layers=2, config={"vocab_size": 50_021}), plan(), CPUS).footprint
    forward = footprint.of_phase("forward")
    assert forward.where == "loss"
    assert forward.live["logits_and_loss"] == pytest.approx(4 * ROWS * (3 * LENGTH - 2) * 50_021, rel=0.001)


@pytest.mark.slow
def test_the_first_step_need_not_be_computed(monkeypatch):
    fp16 = dtypes(param="fp16", loss_scaling=True, frozen_storage="bf16")
    cases = [
        (workload(layers=2), plan(accumulation_steps=2), CPUS),
        (workload(layers=2, lora=LORA), plan(dtypes=fp16, reshard_after_forward=4), A10),
    ]
    quick = [by_phase(at_full_depth(*case)) for case in cases]
    monkeypatch.setattr(trace_run._Run, "start", lambda run, optimizer, scaler: run.step(optimizer, scaler))
    assert [by_phase(at_full_depth(*case)) for case in cases] == quick


@pytest.mark.parametrize("mode", ["reduce_each", "defer_all"])
def test_micro_batches_between_the_second_and_the_last_change_nothing(mode, monkeypatch):
    how = plan(accumulation_steps=5, accumulation_mode=mode)
    few = by_phase(at_full_depth(workload(layers=2), how, CPUS))
    monkeypatch.setattr(trace_run, "MICRO_BATCHES", 5)
    assert by_phase(at_full_depth(workload(layers=2), how, CPUS)) == few


def test_nothing_stays_behind_and_the_next_trace_says_the_same():
    before = (import_utils.is_fake_tensor, F.scaled_dot_product_attention, F.dropout, torch.rms_norm)
    first = trace(workload(layers=2), plan(), A10)
    assert (import_utils.is_fake_tensor, F.scaled_dot_product_attention, F.dropout, torch.rms_norm) == before
    assert not dist.is_initialized()
    assert trace(workload(layers=2), plan(), A10) == first


def test_a_process_that_belongs_to_a_group_is_refused():
    with fake_group(2), pytest.raises(RuntimeError, match="belongs to a process group already"):
        trace(workload(layers=2), plan(), CPUS)
    assert not dist.is_initialized()


def test_an_error_leaves_no_group_behind():
    with pytest.raises(BadInput, match=r"model\.attention"):
        trace(workload("gemma2", layers=2), plan(attention="sdpa"), CPUS)
    assert not dist.is_initialized()


def test_padding_makes_a_mask():
    mask = LENGTH * LENGTH * ROWS
    without, padded = (
        trace(workload(layers=2, padded=given), plan(), CPUS).footprint.of_phase("forward") for given in (False, True)
    )
    assert padded.live["activations"] - without.live["activations"] >= mask


def test_rows_that_a_tensor_axis_does_not_divide_are_padded():
    how = plan(mesh=Mesh(shard=4, tensor=2, sequence_parallel=True), activation_checkpointing="none")
    odd, even = (
        trace(workload(layers=2, seq_len=length, config={"vocab_size": 101}), how, CPUS).footprint.of_phase("forward")
        for length in (37, 38)
    )
    assert odd.live["activations"] >= even.live["activations"] + ROWS * 38 * 38


def test_without_rows_held_out_there_is_no_evaluation():
    footprint = trace(workload(layers=2, held_out=False), plan(), CPUS).footprint
    assert footprint.of_phase("evaluation") is None


def test_a_chunked_head_holds_the_logits_of_one_chunk():
    work = workload(layers=2, config={"vocab_size": 8009})
    eager = trace(work, plan(), CPUS).footprint.of_phase("forward")
    chunked = trace(work, plan(loss_head="chunked", loss_chunk=8), CPUS).footprint.of_phase("forward")
    assert eager.live["logits_and_loss"] == pytest.approx(4 * ROWS * (3 * LENGTH - 2) * 8009, rel=0.001)
    assert chunked.live.get("logits_and_loss", 0) < 14 * 8 * 8009


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("gpt2", {}),
        pytest.param("phi3", {}, marks=pytest.mark.slow),
        pytest.param("mixtral", {"num_local_experts": 3}, marks=pytest.mark.slow),
        ("deepseek_v3", LATENT),
        pytest.param("gemma3_text", {"sliding_window": 16}, marks=pytest.mark.slow),
    ],
)
def test_other_families_are_traced(family, config):
    report = trace(workload(family, layers=2, config=config), plan(activation_checkpointing="none"), A10)
    assert report.footprint.of_phase("forward").live["activations"] > 0


def test_a_model_that_fake_tensors_do_not_go_through_is_refused(monkeypatch):
    def fails(*args, **kwargs):
        raise NotImplementedError("no such operator\nin detail")

    monkeypatch.setattr("shardwise.predict.trace.observe", fails)
    with pytest.raises(BadInput, match="cannot be traced: NotImplementedError: no such operator; use the estimate"):
        trace(workload(layers=2), plan(), CPUS)


def test_what_cannot_be_is_refused_before_anything_is_built():
    with pytest.raises(BadInput, match=r"adamw_8bit.*cannot be traced.*use the estimate"):
        trace(workload(layers=2), plan(optimizer="adamw_8bit"), A10)
    with pytest.raises(BadInput, match="runs on GPUs only"):
        trace(workload(layers=2), plan(loss_head="fused"), CPUS)


def test_notes_say_what_stands_in():
    how = plan(attention="flash_attention_2", compile=True, activation_checkpointing="none")
    report = trace(workload("qwen3_moe", layers=2, config=MIXTURE), how, A10)
    assert report.plan is how
    for word in ("as on A10: attention kernels", "flash_attention_2", "without compiling", "experts"):
        assert any(word in note for note in report.notes)


def test_a_plan_for_cpus_exchanges_where_gpus_call_their_own_collectives():
    """The exchange receives every part in a buffer of its own before it adds them up."""
    how = plan(reduce_scatter=ReduceScatter(buffers=2, separate_group=False, asynchronous=True))
    cpus, gpus = (
        trace(workload(layers=2), how, cluster).footprint.of_phase("backward").live["reduce_scatter_buffers"]
        for cluster in (CPUS, A10)
    )
    assert cpus > 1.5 * gpus


def test_the_largest_buffer_has_its_name_at_the_real_depth():
    wide = {"intermediate_size": 20_000, "vocab_size": 101}
    largest = trace(workload(layers=9, config=wide), plan(), A10).footprint.largest_buffer
    assert largest.category == "reduce_scatter_buffers"
    assert largest.where in [f"model.layers.{number}" for number in range(9)]
