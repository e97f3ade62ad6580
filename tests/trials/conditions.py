"""Marks for tests that need more than Python."""

from __future__ import annotations

import pytest

from shardwise.trials.lab import unavailable

needs_lab = pytest.mark.skipif(bool(unavailable()), reason=unavailable())
"""Skips a test, with the reason, on a machine that cannot make a lab."""
