"""What the model of collectives had to fit: the rest are facts of `catalogue/fabrics.yaml`, with their sources."""

from __future__ import annotations

from shardwise.predict.constants import Constant

COLLECTIVE_START = Constant(
    name="COLLECTIVE_START",
    value=60e-6,
    low=20e-6,
    high=150e-6,
    meaning="seconds of any collective before the first byte is on its way: launch, ranks that wait for each other,"
    " the ring that fills",
    source="nccl-tests on 2 to 16 cards: 20 to 60 us (nccl-tests#232, nccl#1411); under torch 100 to 160 on 8"
    " (stas00/ml-engineering, autoparallel)",
    unit="seconds",
)

RING_STEP = Constant(
    name="RING_STEP",
    value=0.8,
    low=0.4,
    high=1.2,
    meaning="seconds of one step of a ring over those in NCCL's own tuning table, protocol Simple",
    source="all-gathers of almost nothing on 8, 64 and 256 H100: 163, 362 and 871 us (autoparallel)",
    unit="ratio",
)

DECLINE = Constant(
    name="DECLINE",
    value=0.05,
    low=0.0,
    high=0.10,
    meaning="bus bandwidth between machines falls as (machines / 2) to minus this: more switches, more that collides",
    source="reduce-scatter on 4 to 128 machines of 8 H100: 360 down to 260 GB/s (nccl#1229); 353 to 300 from 2 to 32"
    " (autoparallel)",
    unit="ratio",
)

CONSTANTS = (COLLECTIVE_START, RING_STEP, DECLINE)
"""All of them."""
