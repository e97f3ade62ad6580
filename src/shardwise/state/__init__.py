"""Checkpoints, resume, export, verify."""
