"""Tests of shardwise.trials."""
