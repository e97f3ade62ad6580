"""Helpers of the tests: forked ranks and tiny models."""
