"""Seconds of collectives on a cluster: who takes part, over which links, and where each figure is from. No torch."""

from shardwise.predict.links.groups import Group, group_of
from shardwise.predict.links.links import Links, links_of

__all__ = ["Group", "Links", "group_of", "links_of"]
