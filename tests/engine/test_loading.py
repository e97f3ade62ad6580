"""Loading costs each rank its own share, and leaves buffers right."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

from engine.training import make_expected, make_job, make_plan
from harness.ranks import run_ranks
from shardwise.engine.buffers import fill_buffers
from shardwise.engine.load import load_model
from shardwise.engine.mesh import build_mesh
from shardwise.engine.source import open_source
from shardwise.spec.problems import BadInput

MIB = 2**20


def _anonymous_bytes():
    """Memory that is this process's own: pages of mapped files do not count, as the kernel may drop them."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon:"))


class _Peak(threading.Thread):
    """Watches this process's anonymous memory until it is stopped."""

    def __init__(self):
        super().__init__(daemon=True)
        self.bytes, self.running = 0, True

    def run(self):
        while self.running:
            self.bytes = max(self.bytes, _anonymous_bytes())
            time.sleep(0.002)

    def stop(self):
        self.running = False
        self.join()
        return max(self.bytes, _anonymous_bytes())


def _load(rank, world, job):
    plan = make_plan(job, world)
    mesh = build_mesh(plan.mesh, "cpu")
    source = open_source(job.model)
    before, watch = _anonymous_bytes(), _Peak()
    watch.start()
    model = load_model(job, plan, source, mesh)
    peak = watch.stop() - before
    held = sum(p.to_local().numel() * p.element_size() for p in model.parameters())
    planned = make_expected(job, plan).units.stored_bytes / world
    return peak, held, planned


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_holds_its_share_and_little_more(tiny, world):
    folder = tiny("llama", vocab=50_001, heads=8, head_dim=64, kv=2, layers=1)
    job = make_job(folder, fsdp={"strategy": "FULL_SHARD"}, global_batch=4, micro_batch=1)
    whole = 2 * 50_001 * 512 * 4
    for peak, held, planned in run_ranks(_load, world, job):
        assert held == pytest.approx(whole / world, rel=0.05)
        assert held == pytest.approx(planned, rel=0.01)
        assert 0.9 * held <= peak < 1.3 * planned, f"{peak / MIB:.0f} MiB at the peak, planned {planned / MIB:.0f} MiB"


class Forgetful(nn.Module):
    """A model whose buffers nobody fills."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(4), persistent=False)

    def _init_weights(self, module):
        pass


class Careful(Forgetful):
    def _init_weights(self, module):
        module.table.copy_(torch.arange(4.0))


def test_a_buffer_that_nobody_fills_is_refused():
    with pytest.raises(BadInput, match="transformers does not fill it"):
        fill_buffers(model := Forgetful(), model)


def test_buffers_outside_the_checkpoint_are_filled():
    model = Careful()
    assert fill_buffers(model, model) == 1
    assert model.table.tolist() == [0, 1, 2, 3]


class WithBuffers(nn.Module):
    """A float buffer, an integer buffer and a rotary table."""

    class RotaryEmbedding(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("inv_freq", torch.ones(2))

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("ids", torch.ones(2, dtype=torch.int64))
        self.rotary = self.RotaryEmbedding()


@pytest.mark.parametrize(("asked", "dtype"), [("bf16", torch.bfloat16), (None, torch.float32)])
def test_buffer_dtype_casts_floating_buffers_except_rotary_tables(tiny, asked, dtype):
    from shardwise.engine.precision import cast_buffers

    job = make_job(tiny("llama"), micro_batch=6, mixed_precision={"param_dtype": "bf16", "buffer_dtype": asked})
    model = WithBuffers()
    cast_buffers(model, make_plan(job, 1).dtypes)
    assert model.scale.dtype == dtype
    assert model.ids.dtype == torch.int64
    assert model.rotary.inv_freq.dtype == torch.float32
