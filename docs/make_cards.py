"""Write docs/cards.md and docs/clusters.md from the catalogue: python docs/make_cards.py"""

from __future__ import annotations

from pathlib import Path

from pages import write

from shardwise.catalogue.cards import DRIVER_KEEPS_MIB, DRIVER_KEEPS_SHARE, MIB, cards, gpu
from shardwise.catalogue.instances import Instance, instances
from shardwise.catalogue.networks import network_of
from shardwise.spec.cluster import NETWORKS, NVL72, Cluster, Rates

TARGET = Path(__file__).with_name("cards.md")
CLUSTERS = Path(__file__).with_name("clusters.md")

HEAD = f"""# Cards of the catalogue

Made from `src/shardwise/catalogue/gpus.yaml` by `python docs/make_cards.py`; a test holds it up to date. How clusters
are named, networks, machines of clouds and files: [clusters.md](clusters.md).

Case, separators, vendor words and the generation of an SXM socket do not matter: `NVIDIA A100-SXM4-80GB` is
`a100 80gb`. A name that may mean several cards (`a100`: 40 or 80 GB) is refused with the choices. Where memory alone
decides, a form factor that is not said is SXM. Devices are counted as torch counts them: an MI250X is two, so a machine
with four of them is `8xMI250X`.

## Memory

Usable is the total that CUDA reports to a program (`torch.cuda.mem_get_info`, and torch's out-of-memory message), in
GiB of 2^30 bytes. It is less than the label, and less than what nvidia-smi shows: the driver keeps a part. Drivers
before 2024 kept up to 1 % less. Where only nvidia-smi's total is known, usable is that less {DRIVER_KEEPS_MIB} MiB and
{100 * DRIVER_KEEPS_SHARE:.2f} %, which meets every card newer than the V100 of which both are known within 0.3 %.
Context and communicators come out of the usable memory; the prediction counts them.

| card | also | label | usable GiB | nvidia-smi MiB | link | usable memory from |
|---|---|--:|--:|--:|---|---|
"""

SPEEDS = """
## Speed

TFLOPS are 10^12 FLOPs a second of dense matrix products: vendors also print figures with sparsity, twice as high, which
training does not reach; on GeForce cards they are those that are accumulated in fp32. `fp32` is in full precision, not
rounded to tf32. What is missing has no units of its own. Memory, link and host are GB (10^9 bytes) a second in one
direction: link to all other devices of a machine together, host to and from host memory before headers. Vendors print
links in both directions together, twice as high. Peer says whether devices of a machine reach each other's memory
directly. Reached is the share of the bf16 figure (fp16 where there is none) that the best large product was measured
at; it is above 1 where cards clock higher than their rated boost, and empty where nobody is known to have measured.

| card | fp32 | tf32 | bf16 | fp16 | fp8 | memory | link | host | peer | reached |
|---|--:|--:|--:|--:|--:|--:|--:|--:|---|--:|
"""

SOURCES = """
Where the figures are from:

"""

NAMES = f"""# Clusters

Made by `python docs/make_cards.py` from the catalogue; a test holds it up to date. Cards: [cards.md](cards.md).

`cluster` in a configuration, and `--cluster`, take

| text | is |
|---|---|
| `detect` | every GPU of this machine, else two CPU processes |
| `8xA10`, `4090` | one machine with eight cards, with one |
| `2x8xH100-SXM-80GB` | machines x devices of each x card |
| `2x8xH100-SXM-80GB ib-8x400` | the same with the network between the machines |
| `2xp5.48xlarge`, `g5.48xlarge` | machines of a cloud by the name of their type |
| `2xcpu` | two CPU processes |
| `mine.yaml` | a file that holds a cluster, from where the command is run |

The nearest name is told for one that is not known.

## Networks

A network is `<kind>-<adapters>x<Gb/s of each>` or `<kind>-<Gb/s of a machine>`: `ib-8x400` is eight adapters of 400
Gb/s in each machine, 400 GB/s of the machine in one direction; `ib-400` is one eighth of that. Kinds are
{", ".join(f"`{kind}`" for kind in NETWORKS)} (`net`: not known), and `{NVL72}` is NVLink over the machines of a
rack (GB200, GB300). More than 1,000,000 Gb/s of a machine are refused.

What large collectives between two machines reach of the wire: of 8 x 400 Gb/s in each, of kernel sockets (`eth`) with
one adapter of 25 and of 100 Gb/s, and of a rack with four GB200 in each machine. The range is over any number of
machines, collectives and makes:

| network | wire GB/s | reached GB/s | share | lowest | highest | from |
|---|--:|--:|--:|--:|--:|---|
"""

ASSUMED = """
Where several machines are named without a network, one is assumed by card, and the prediction says so. Adapters go with
devices: four cards of a machine have half of what eight have.

| cards | eight of a machine | why |
|---|---|---|
"""

MACHINES = """
## Machines of clouds

The name may be written in any case, with or without separators, `ml.` or `Standard_` before it; `p5.48xl` is
`p5.48xlarge`. It brings the cards, host memory, cores and network, which another network behind the name replaces.
Cores are physical ones.

| type | cloud | devices | host GiB | cores | network | note |
|---|---|---|--:|--:|---|---|
"""

FILES = """
Sources: {sources}.

## Files

A file holds what the catalogue does not know, or what was measured:

```yaml
name: lab
nodes: 2
per_node: 4
gpu: RTX-4090
network: eth-2x25
host_bytes: 270000000000
host_cores: 32
```

`nodes` and `per_node` are needed. `gpu` is a card of the catalogue, `cpu`, or a card given whole with at least `name`
and `usable: {{bytes: ..., source: ...}}`; without `rates` its memory can be predicted and its time cannot. Sizes are
bytes, rates bytes or FLOPs per second and in one direction; figures that can only be GB or TFLOPS are refused.
`measured` holds the curves of a probe, which take the place of the catalogue's figures. Files that end in `.json` hold
the same as JSON. Unknown fields are refused, and errors name the field and the line.

A card given whole is timed with its products in `fp32` and in the dtype of computation, alone or over PCIe; how fast
collectives over its NVLink are only a probe can say:

```yaml
nodes: 1
per_node: 8
gpu:
  name: MINE
  usable: {{bytes: 85000000000, source: torch.cuda.mem_get_info}}
  link: pcie
  rates:
    products:
      fp32: {{value: 60.0e+12, source: datasheet}}
      bf16: {{value: 500.0e+12, source: datasheet}}
    memory: {{value: 2.0e+12, source: datasheet}}
    link: {{value: 31.5e+9, source: PCIe 4.0 x16}}
    host: {{value: 31.5e+9, source: PCIe 4.0 x16}}
    peer_to_peer: true
```
"""


def page() -> str:
    """Return the page of cards."""
    return HEAD + "".join(map(_memory, cards())) + SPEEDS + "".join(map(_speed, cards())) + SOURCES + _sources()


def clusters_page() -> str:
    """Return the page of clusters, networks and machines."""
    kinds = [f"{kind}-8x400" for kind in NETWORKS if kind not in ("eth", "opa")] + ["opa-4x100", "eth-25", "eth-100"]
    sources = "; ".join(dict.fromkeys(f"{each.cloud} {each.source}" for each in instances().values()))
    return (
        NAMES
        + "".join(map(_network, [*kinds, NVL72]))
        + ASSUMED
        + _assumed()
        + MACHINES
        + "".join(_machine(name, each) for name, each in instances().items())
        + FILES.format(sources=sources)
    )


def _memory(name: str) -> str:
    card, usable = cards()[name], gpu(name).usable
    also = ", ".join(f"`{other}`" for other in card.other_names)
    shown = "" if card.smi_mib is None else str(card.smi_mib)
    gib = f"{usable.bytes / MIB / 1024:.2f}"
    return f"| `{name}` | {also} | {card.label_gb} GB | {gib} | {shown} | {card.link} | {usable.source} |\n"


def _rates(name: str) -> Rates:
    found = gpu(name).rates
    assert found is not None
    return found


def _speed(name: str) -> str:
    rates = _rates(name)
    products = [rates.products.get(dtype) for dtype in ("fp32", "tf32", "bf16", "fp16", "fp8")]
    cells = ["" if figure is None else f"{figure.value / 1e12:g}" for figure in products]
    cells += [f"{figure.value / 1e9:g}" for figure in (rates.memory, rates.link, rates.host)]
    cells.append("yes" if rates.peer_to_peer else "no")
    cells.append("" if rates.achieved is None else f"{rates.achieved.value:g}")
    return f"| `{name}` | {' | '.join(cells)} |\n"


def _sources() -> str:
    lines = []
    for name, card in cards().items():
        own = "".join(f"; {figure}: {source}" for figure, source in card.rates.sources.items())
        lines.append(f"- `{name}`: {card.rates.source}{own}\n")
    return "".join(lines)


def _network(name: str) -> str:
    card = gpu("GB200" if name == NVL72 else "H100-SXM-80GB")
    found = network_of(Cluster(name="", nodes=2, per_node=4 if name == NVL72 else 8, gpu=card, network=name))
    assert found is not None
    shares = (found.achieved.value, found.lowest, found.highest)
    cells = [
        f"{found.node_rate / 1e9:g}",
        f"{round(found.reached / 1e9, 1):g}",
        *(f"{100 * share:.0f} %" for share in shares),
    ]
    return f"| `{name}` | {' | '.join(cells)} | {found.achieved.source} |\n"


def _assumed() -> str:
    """Return the rows of what is assumed, cards of one rule in one row, the rule for the rest at the end."""
    rules: dict[tuple[str, str], list[str]] = {}
    for name in cards():
        found = network_of(Cluster(name="", nodes=2, per_node=8, gpu=gpu(name)))
        assert found is not None
        rules.setdefault((found.name, found.source), []).append(f"`{name}`")
    rest = max(rules, key=lambda rule: len(rules[rule]))
    rules[rest] = ["every other card, and CPU processes"]
    ordered = sorted(rules, key=lambda rule: rule == rest)
    return "".join(f"| {', '.join(rules[rule])} | `{rule[0]}` | {rule[1]} |\n" for rule in ordered)


def _machine(name: str, machine: Instance) -> str:
    network = "" if machine.network is None else f"`{machine.network}`"
    devices = f"{machine.devices} x `{machine.card}`"
    cells = (f"`{name}`", machine.cloud, devices, str(machine.gib or ""), str(machine.cores), network, machine.note)
    return f"| {' | '.join(cells)} |\n"


PAGES = {TARGET: page, CLUSTERS: clusters_page}
"""Page -> what makes its whole text."""


if __name__ == "__main__":
    write(PAGES)
