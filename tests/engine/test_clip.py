"""The norm is that of the whole gradient, whatever meshes hold it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from harness.ranks import run_ranks
from shardwise.engine.clip import clip_gradients
from shardwise.engine.compat import strided_shard

MESHES = {
    "shard": ((2,), ("shard",)),
    "tensor": ((1, 2), ("shard", "tensor")),
    "shard-x-tensor": ((2, 2), ("shard", "tensor")),
    "copies-x-tensor": ((2, 1, 2), ("replicate", "shard", "tensor")),
    "copies-x-shard": ((2, 2), ("replicate", "shard")),
    "tensor-4": ((1, 4), ("shard", "tensor")),
}


def _gradients(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in ((8, 12), (8,), (12, 8), (5,), (3, 4))]


def _layouts(mesh):
    """Columns, norms on the tensor axis, rows, norms on the data axes alone, and an uneven shard."""
    names = mesh.mesh_dim_names
    data = mesh[tuple(n for n in names if n != "tensor")] if "tensor" in names and len(names) > 2 else mesh["shard"]
    if "tensor" not in names:
        data = mesh
    first = [Replicate()] * (data.ndim - 1)
    if "tensor" not in names:
        return [(mesh, [*first, Shard(0)])] * 5
    ranks = mesh["tensor"].size()
    return [
        (mesh, [*first, strided_shard(0, ranks), Shard(0)]),
        (mesh, [*first, Shard(0), Replicate()]),
        (mesh, [*first, Shard(0), Shard(1)]),
        (data, [*first, Shard(0)]),
        (data, [*first, Shard(0)]),
    ]


def _clip(rank, world, sizes, names, max_norm):
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    parameters = []
    for gradient, (held, placements) in zip(_gradients(), _layouts(mesh), strict=True):
        parameter = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), held, placements))
        parameter.grad = distribute_tensor(gradient, held, placements)
        parameters.append(parameter)
    norm = clip_gradients([*parameters, nn.Parameter(torch.zeros(2))], max_norm)
    return float(norm), [p.grad.full_tensor() for p in parameters]


@pytest.mark.parametrize("max_norm", [0.5, None], ids=["clip", "measure"])
@pytest.mark.parametrize("mesh", MESHES)
def test_norm_and_clipping_equal_one_process(mesh, max_norm):
    sizes, names = MESHES[mesh]
    whole = [nn.Parameter(torch.zeros_like(gradient)) for gradient in _gradients()]
    for parameter, gradient in zip(whole, _gradients(), strict=True):
        parameter.grad = gradient
    wanted = float(torch.nn.utils.clip_grad_norm_(whole, max_norm or float("inf")))
    for norm, gradients in run_ranks(_clip, torch.Size(sizes).numel(), sizes, names, max_norm):
        assert norm == pytest.approx(wanted, rel=1e-6)
        for gradient, parameter in zip(gradients, whole, strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=0)


def test_the_norm_of_bf16_gradients_is_not_rounded_to_bf16():
    parameters = []
    for gradient in _gradients(torch.bfloat16):
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient
        parameters.append(parameter)
    wanted = torch.cat([p.grad.double().flatten() for p in parameters]).norm()
    norm = clip_gradients(parameters, None)
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(float(wanted), rel=1e-6)


def test_without_gradients_the_norm_is_zero():
    assert float(clip_gradients([nn.Parameter(torch.ones(2))], 1.0)) == 0.0
