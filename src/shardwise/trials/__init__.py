"""Trying things before they cost cluster time: hosts with a slow link on one machine."""
