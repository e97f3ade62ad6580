"""Seconds of collectives on a cluster: measured where a probe measured them, else by the model."""

from __future__ import annotations

from collections.abc import Mapping
from math import log2

from shardwise.catalogue.fabrics import known_fabrics
from shardwise.catalogue.networks import network_of
from shardwise.predict.links.buses import Buses
from shardwise.predict.links.constants import CONSTANTS
from shardwise.predict.links.groups import Group
from shardwise.predict.links.model import Model
from shardwise.spec.cluster import Cluster
from shardwise.spec.problems import BadInput, Problem
from shardwise.spec.speeds import CollectiveSpeed, TimedKind

LIMIT = 8192
"""Results that are remembered; at more, all are forgotten."""

_MEASURE = "run `shardwise probe` on these machines and give the file that it writes as `cluster`"


def links_of(cluster: Cluster, *, values: Mapping[str, float] | None = None) -> Links:
    """Return the links of a cluster.

    Args:
        cluster: Its measured collectives take the model's place; other shapes are scaled from the nearest of them.
        values: Constants by name that differ from their best guess.

    Raises:
        BadInput: several ranks, and neither the card's rates and fabric nor measured collectives are known.
    """
    measured = cluster.measured.collectives if cluster.measured is not None else ()
    model = _model_of(cluster, values or {})
    if model is None and not measured and cluster.world > 1:
        what = "collectives between CPU processes" if cluster.gpu is None else f"the links of {cluster.gpu.name}"
        raise BadInput(Problem(field="cluster", value=cluster.name, reason=f"{what} are not known", fix=_MEASURE))
    return Links(cluster, model, measured)


class Links:
    """Seconds of collectives on one cluster; results are remembered."""

    def __init__(self, cluster: Cluster, model: Model | None, measured: tuple[CollectiveSpeed, ...]) -> None:
        self.cluster = cluster
        """Whose links they are."""
        self._model = model
        fits = [speed for speed in measured if speed.nodes <= cluster.nodes and speed.per_node <= cluster.per_node]
        self._measured = {(speed.kind, speed.nodes, speed.per_node): speed for speed in fits}
        self._known: dict[tuple[TimedKind, float, Group], float] = {}

    def seconds(self, kind: TimedKind, payload_bytes: float, group: Group) -> float:
        """Return the seconds of one collective while all groups of its kind do the same; 0 for nothing or one rank.

        Args:
            kind: What it is.
            payload_bytes: Bytes of the whole buffer: all ranks' shards together.
            group: Who takes part.

        Raises:
            BadInput: this shape was not measured, and there is no model: CPU processes, cards without rates.
        """
        key = (kind, payload_bytes, group)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= LIMIT:
                self._known.clear()
            found = self._known[key] = self._seconds(*key)
        return found

    def source(self, kind: TimedKind, group: Group) -> str:
        """Return where the seconds of this kind over this group are from; begins with `measured`, `catalogue`, or
        `assumed` where they rest on something that nobody said."""
        if group.ranks == 1:
            return "catalogue: one rank exchanges nothing"
        speed = self._measured.get((kind, group.nodes, group.per_node))
        if speed is not None:
            return f"measured: {speed.curve.source}"
        bus = self._model_for(kind, group).bus(group)
        by_model = f"{'assumed' if bus.assumed else 'catalogue'}: {bus.source}"
        if not self._measured:
            return by_model
        near = self._nearest(kind, group)
        shape = f"{near.kind} over {near.nodes} x {near.per_node} ranks"
        return f"measured, scaled from {shape} as the model does: {near.curve.source}; the model: {by_model}"

    def _seconds(self, kind: TimedKind, payload: float, group: Group) -> float:
        if payload <= 0 or group.ranks == 1:
            return 0.0
        speed = self._measured.get((kind, group.nodes, group.per_node))
        if speed is not None:
            return speed.curve.seconds(payload)
        model = self._model_for(kind, group)
        seconds = model.seconds(kind, payload, group)
        if not self._measured:
            return seconds
        near = self._nearest(kind, group)
        beside = max(1, self.cluster.per_node // near.per_node)
        there = model.seconds(near.kind, payload, Group(near.nodes, near.per_node, beside))
        return seconds * near.curve.seconds(payload) / there

    def _model_for(self, kind: TimedKind, group: Group) -> Model:
        if self._model is not None:
            return self._model
        reason = f"{kind} over {group.nodes} x {group.per_node} ranks was not measured"
        shapes = ", ".join(f"{kind} over {nodes} x {per_node}" for kind, nodes, per_node in self._measured)
        raise BadInput(Problem(field="cluster", value=self.cluster.name, reason=reason, allowed=shapes, fix=_MEASURE))

    def _nearest(self, kind: TimedKind, group: Group) -> CollectiveSpeed:
        """Return what was measured nearest: the same side of a machine's border, few doublings away, of this kind."""

        def distance(speed: CollectiveSpeed) -> float:
            doublings = abs(log2(speed.nodes / group.nodes)) + abs(log2(speed.per_node / group.per_node))
            return doublings + 2.0 * ((speed.nodes > 1) != (group.nodes > 1)) + (speed.kind != kind)

        return min(self._measured.values(), key=distance)


def _model_of(cluster: Cluster, values: Mapping[str, float]) -> Model | None:
    """Return the model of a cluster's links; None: there are no cards, or their rates or fabric are not known."""
    card = cluster.gpu
    if card is None or card.rates is None:
        return None
    facts = known_fabrics()
    fabric = facts.of_card(card)
    if fabric is None:
        return None
    constants = {constant.name: values.get(constant.name, constant.value) for constant in CONSTANTS}
    buses = Buses(
        rates=card.rates,
        per_node=cluster.per_node,
        network=network_of(cluster),
        fabric=fabric,
        bridge=facts.bridge_of(card.name),
    )
    return Model(
        buses=buses,
        start_s=constants["COLLECTIVE_START"],
        step=constants["RING_STEP"],
        decline=constants["DECLINE"],
    )
