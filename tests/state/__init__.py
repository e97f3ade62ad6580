"""Tests of shardwise.state."""
