"""Clusters by the names that people type: `8xA10`, `2x8xH100-SXM-80GB ib-8x400`, `p5.48xlarge`, `2xcpu`, a file."""

from __future__ import annotations

import re
from pathlib import Path

from shardwise.catalogue.cards import find_gpu, gpu, is_card, spellings, unknown
from shardwise.catalogue.cluster_file import read_cluster
from shardwise.catalogue.instances import find_instance, instances
from shardwise.catalogue.networks import check_network, not_a_network
from shardwise.spec.cluster import CPU, NETWORKS, Cluster, ClusterText, is_cluster_file, split_cluster
from shardwise.spec.problems import BadInput, Problem

GIB = 2**30

_LIKE_NETWORKS = (*NETWORKS, "nvl", "infiniband")
_COUNT_BEHIND = re.compile(r"(.+?)\s*[xX\u00d7*]\s*(\d+)")


def find_cluster(text: str, *, field: str = "cluster") -> Cluster:
    """Return the cluster that `text` names.

    That is `[<machines>x]<devices of each>x<card>[ <network>]`, a card alone, `[<machines>x]<type of a cloud's
    machine>[ <network>]`, or a file that holds a cluster. The count is that of devices as torch sees them: a machine
    with four MI250X cards is `8xMI250X`.

    Args:
        text: As typed.
        field: The configuration key or option that it stands in, for the message.

    Raises:
        BadInput: no such form, card or type, counts below 1, a network that is none, a file that holds no cluster.
    """
    if is_cluster_file(text):
        return read_cluster(Path(text.strip()))
    parts = split_cluster(text)
    if any(count < 1 for count in parts.counts) or len(parts.counts) > 2:
        too_many = "takes two counts at most, machines and devices of each"
        reason = too_many if len(parts.counts) > 2 else "counts of machines and devices start at 1"
        raise BadInput(Problem(field=field, value=text, reason=reason, allowed="8xA10, 2x8xH100, 2xcpu"))
    name = " ".join(text.split())
    nodes, per_node = (1, 1, *parts.counts)[-2:]
    if parts.card.lower() == CPU:
        found = Cluster(name=name, nodes=nodes, per_node=per_node, gpu=None, network=parts.network)
    elif is_card(parts.card):
        card = find_gpu(parts.card, field=field)
        found = Cluster(name=name, nodes=nodes, per_node=per_node, gpu=card, network=parts.network)
    else:
        found = _machines(name, parts, field)
    if found.network is not None:
        check_network(found.network, found.gpu, found.world, field=field, value=text)
    return found


def _machines(name: str, parts: ClusterText, field: str) -> Cluster:
    """Return machines of a cloud; their network is what is typed, else what the cloud gives them."""
    known = find_instance(parts.card)
    if known is None:
        raise _unknown(name, parts, field)
    kind, machine = known
    if len(parts.counts) > 1:
        reason = f"counts devices of each machine, and a {kind} has {machine.devices} of them"
        raise BadInput(Problem(field=field, value=name, reason=reason, fix=f"write {parts.counts[0]}x{kind}"))
    card = gpu(machine.card)
    if machine.peer_to_peer is not None and card.rates is not None:
        rates = card.rates.model_copy(update={"peer_to_peer": machine.peer_to_peer})
        card = card.model_copy(update={"rates": rates})
    return Cluster(
        name=name,
        nodes=parts.counts[0] if parts.counts else 1,
        per_node=machine.devices,
        gpu=card,
        host_bytes=None if machine.gib is None else machine.gib * GIB,
        host_cores=machine.cores,
        network=parts.network or machine.network,
    )


def _unknown(name: str, parts: ClusterText, field: str) -> BadInput:
    """Return the refusal of what names no machines: by its network or its count where only that is wrong."""
    card, _, last = parts.card.rpartition(" ")
    if last.lower().startswith(_LIKE_NETWORKS) and (is_card(card) or find_instance(card) is not None):
        return BadInput(Problem(field=field, value=name, **not_a_network(last.lower())))
    turned = _COUNT_BEHIND.fullmatch(parts.card)
    if turned is not None and (is_card(turned[1]) or find_instance(turned[1]) is not None):
        fix = f"write {turned[2]}x{turned[1]}"
        return BadInput(Problem(field=field, value=name, reason="has the count behind the machine", fix=fix))
    reason = "is not a card or a cloud's machine of the catalogue"
    return unknown(parts.card, field, reason, (*spellings(), *instances()))
