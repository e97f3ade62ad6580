"""Dtype names of a Plan as torch dtypes, and back."""

from __future__ import annotations

import torch

from shardwise.spec.strict import Dtype

TORCH_DTYPE: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAME: dict[torch.dtype, Dtype] = {dtype: name for name, dtype in TORCH_DTYPE.items()}
