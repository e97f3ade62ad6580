"""Observers of a run, real or fake: what it communicated."""
