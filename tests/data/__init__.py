"""Tests of `shardwise.data`."""
