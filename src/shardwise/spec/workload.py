"""The Workload: what one training step computes, apart from how it is laid out."""

from __future__ import annotations

from shardwise.spec.method import Lora
from shardwise.spec.model_spec import ModelSpec
from shardwise.spec.strict import PositiveInt, Strict

HELD_OUT_PER_TRAINED = 2
"""Held-out rows per forward for each training row: without a backward, two need less memory than one."""


class Workload(Strict):
    """A model, what of it trains, and how long its rows are. Rows per forward are the plan's."""

    model: ModelSpec
    """The model's shape."""
    seq_len: PositiveInt
    """Tokens of each row; every row is taken as this long."""
    lora: Lora | None = None
    """Adapters; None: every weight trains."""
    padded: bool = False
    """Rows of one micro-batch differ in length, so attention gets a mask of rows x length x length."""
    held_out: bool = True
    """Rows are held out, so there are evaluations between steps; False: training alone is looked at."""
