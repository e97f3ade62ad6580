"""`shardwise probe`: how fast this cluster really is, written as a Cluster file that plans are timed with."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.new_file import check_new_file
from shardwise.spec.cluster import CLUSTER_FILES
from shardwise.spec.problems import BadInput, Problem

if TYPE_CHECKING:
    import torch

    from shardwise.measure.probe.team import Team
    from shardwise.spec.cluster import Cluster

EXIT_CODES = {"ended": 0, "stopped": 3, "failed": 4}
"""By how the ranks ended."""


def probe(
    output: Annotated[Path, typer.Option("-o", "--output", help="The new Cluster file.")] = Path("cluster.yaml"),
    cluster: Annotated[
        str | None,
        typer.Option(help="What this is, with its network: 2x8xH100-SXM-80GB ib-8x400. Default: what is found."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Measure devices, links and hosts, name what is slow, and write a Cluster file.

    Alone it starts a rank for every GPU of this machine, or two on CPUs; under torchrun every rank calls it.
    A job takes the file as `cluster: cluster.yaml`.

    Exit codes: 0 written, whatever is slow; 2 bad input; 3 stopped by a signal, nothing is written; 4 it failed.
    """
    if cluster is not None and cluster.strip().lower() == "detect":
        cluster = None
    if "RANK" in os.environ:
        raise typer.Exit(_be_rank(output, cluster, as_json=as_json))
    here = _here(cluster)
    _refuse_output(output)
    raise typer.Exit(_start(here, output, cluster, as_json=as_json))


def _start(here: Cluster, output: Path, cluster: str | None, *, as_json: bool) -> int:
    """Start the ranks of this machine with torchrun and return the exit code."""
    from shardwise.machine.launch import run_ranks

    words = ["-m", "shardwise.cli.main", "probe", "--output", str(output), *(["--json"] if as_json else [])]
    words += [] if cluster is None else ["--cluster", cluster]
    ended = run_ranks(words, ranks=here.per_node, device_type=here.device_type)
    if ended == "stopped":
        output.unlink(missing_ok=True)
        print("stopped; nothing is written", file=sys.stderr, flush=True)
    return EXIT_CODES[ended]


def _here(cluster: str | None) -> Cluster:
    """Return this machine as the cluster that is probed; BadInput where `cluster` names another."""
    from shardwise.machine.detect import detect_cluster

    if cluster is None:
        return detect_cluster()
    named = _named(cluster)
    if named.nodes > 1:
        reason = f"has {named.nodes} machines, and this command starts ranks on this one alone"
        fix = "call it on every machine under torchrun --nnodes (docs/probe.md)"
        raise BadInput(Problem(field="--cluster", value=cluster, reason=reason, fix=fix))
    _check(named, nodes=1, per_node=named.per_node if named.gpu is None else detect_cluster().per_node)
    return named


def _named(cluster: str) -> Cluster:
    from shardwise.catalogue.clusters import find_cluster

    return find_cluster(cluster, field="--cluster")


def _check(named: Cluster, *, nodes: int, per_node: int) -> None:
    """Refuse a name that is not what is here."""
    from shardwise.machine.detect import detect_cluster

    here = detect_cluster()
    if named.device_type != here.device_type and named.gpu is not None:
        reason = "names cards, and this machine has no GPU"
    elif named.gpu is not None and here.gpu is not None and named.gpu.name != here.gpu.name:
        reason = f"this machine has {here.gpu.name}"
    elif (named.nodes, named.per_node) not in ((nodes, per_node), (1, nodes * per_node)):
        reason = f"there are {nodes} machines with {per_node} ranks each"
    else:
        return
    fix = "leave it out to take what is found"
    raise BadInput(Problem(field="--cluster", value=named.name, reason=reason, fix=fix))


def _refuse_output(output: Path) -> None:
    """Refuse before measuring what cannot be written after it."""
    if output.suffix.lower() not in CLUSTER_FILES:
        allowed = ", ".join(f"*{ending}" for ending in CLUSTER_FILES)
        raise BadInput(Problem(field="--output", value=str(output), reason="is no cluster's file", allowed=allowed))
    check_new_file("--output", output)


def _be_rank(output: Path, cluster: str | None, *, as_json: bool) -> int:
    """Measure as one rank of torchrun's; rank 0 checks what was given, prints and writes."""
    import torch.distributed as dist

    from shardwise.measure.probe.run import limits_of, probe
    from shardwise.measure.probe.table import print_probe, probe_to_json
    from shardwise.measure.probe.team import join

    device = _connect()
    team = join(device)
    said: list[BadInput | Cluster | None] = [None]
    if team.rank == 0:
        try:
            _refuse_output(output)
            said = [_cluster(cluster, team)]
        except BadInput as error:
            said = [error]
    dist.broadcast_object_list(said, src=0)
    if isinstance(said[0], BadInput):
        dist.destroy_process_group()
        if team.rank == 0:
            raise said[0]
        return 2
    assert said[0] is not None
    probed = probe(team, limits_of(device))
    if team.rank == 0:
        from rich.console import Console

        from shardwise.catalogue.cluster_file import write_cluster

        found = said[0].model_copy(update={"measured": probed.measured})
        write_cluster(found, output)
        if as_json:
            print(json.dumps(probe_to_json(found, probed), indent=1), flush=True)
        else:
            print_probe(Console(soft_wrap=True), found, probed)
            print(f"written to {output}; a job takes it as cluster: {output}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _connect() -> torch.device:
    """Join the process group and return this rank's device."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from shardwise.machine.detect import backend_of

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(backend_of(device.type), timeout=timedelta(minutes=5), device_id=device if on_gpu else None)
    return device


def _cluster(cluster: str | None, team: Team) -> Cluster:
    """Return what is probed, as named or as found, without measurements."""
    from shardwise.machine.detect import detect_cluster

    here = detect_cluster()
    if cluster is not None:
        named = _named(cluster)
        _check(named, nodes=team.nodes, per_node=team.per_node)
        here = here.model_copy(update={"network": named.network})
    card = "cpu" if here.gpu is None else here.gpu.name
    machines = "" if team.nodes == 1 else f"{team.nodes}x"
    network = "" if here.network is None else f" {here.network}"
    return here.model_copy(
        update={
            "name": f"{machines}{team.per_node}x{card}{network}",
            "nodes": team.nodes,
            "per_node": team.per_node,
        }
    )
