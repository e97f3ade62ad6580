"""Clusters as files: written, read back equal, and refused by the field."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from house.source import ROOT
from shardwise.catalogue.cards import cards, gpu
from shardwise.catalogue.cluster_file import read_cluster, write_cluster
from shardwise.catalogue.clusters import find_cluster
from shardwise.catalogue.models import find_model
from shardwise.planner.advice import by_estimate
from shardwise.planner.by_shape import plan_by_shape
from shardwise.spec.cluster import Cluster, Figure, Gpu, Rates, Sourced
from shardwise.spec.curve import Curve
from shardwise.spec.problems import BadInput
from shardwise.spec.reader import read_job
from shardwise.spec.speeds import CollectiveSpeed, DeviceSpeeds, HostSpeeds, Measured

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
POSITIVE = st.floats(1e-9, 1e18)
COUNT = st.integers(1, 2**50)
SIZES = st.integers(2**28, 2**50)
FIGURES = st.builds(Figure, value=st.floats(1e9, 1e18), source=WORDS)
CURVES = st.builds(
    Curve,
    points=st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=4, unique_by=lambda point: point[0]).map(
        lambda points: tuple(sorted(points))
    ),
    source=WORDS,
)
DTYPES = st.sampled_from(["fp32", "tf32", "bf16", "fp16", "fp8"])
RATES = st.builds(
    Rates,
    products=st.dictionaries(DTYPES, FIGURES),
    memory=FIGURES,
    link=FIGURES,
    host=FIGURES,
    peer_to_peer=st.booleans(),
    achieved=st.none() | FIGURES,
)
CARDS = st.builds(
    Gpu,
    name=WORDS | st.sampled_from(list(cards())),
    usable=st.builds(Sourced, bytes=SIZES, source=WORDS),
    link=st.sampled_from([None, "nvlink", "pcie"]),
    rates=st.none() | RATES,
)
MEASURED = st.builds(
    Measured,
    device=st.builds(
        DeviceSpeeds,
        products=st.dictionaries(DTYPES, CURVES, max_size=2),
        attention=st.dictionaries(DTYPES, CURVES, max_size=1),
        memory=st.dictionaries(DTYPES, CURVES, min_size=1, max_size=2),
        issue_s=st.floats(0, 1),
    ),
    collectives=st.lists(
        st.builds(
            CollectiveSpeed,
            kind=st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]),
            nodes=st.integers(1, 9),
            per_node=st.integers(1, 9),
            curve=CURVES,
        ),
        max_size=2,
    ).map(tuple),
    host=st.none() | st.builds(HostSpeeds, link=st.none() | CURVES, adam_s=POSITIVE),
    source=WORDS,
)
CLUSTERS = st.builds(
    Cluster,
    name=WORDS,
    nodes=st.integers(1, 999),
    per_node=st.integers(1, 16),
    gpu=st.none() | st.sampled_from(list(cards())).map(gpu) | CARDS,
    host_bytes=st.none() | SIZES,
    host_cores=st.none() | COUNT,
    network=st.none() | st.sampled_from(["ib-8x400", "roce-1600", "eth-25"]),
    measured=st.none() | MEASURED,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cluster=CLUSTERS, end=st.sampled_from([".yaml", ".json", ".YML"]))
def test_what_is_written_is_read_back_equal(tmp_path, cluster, end):
    path = tmp_path / f"cluster{end}"
    path.unlink(missing_ok=True)
    write_cluster(cluster, path)
    assert read_cluster(path) == cluster


def written(folder, text, name="mine.yaml"):
    path = folder / name
    path.write_text(text)
    return path


def refusal(path):
    with pytest.raises(BadInput) as caught:
        read_cluster(path)
    return caught.value.problems


def test_a_file_as_people_write_it(tmp_path):
    found = read_cluster(written(tmp_path, "nodes: 2\nper_node: 4\ngpu: rtx 4090\nnetwork: eth-25\nhost_cores: 32\n"))
    assert (found.name, found.nodes, found.per_node, found.network) == ("mine.yaml", 2, 4, "eth-25")
    assert found.gpu == gpu("RTX-4090")
    assert (found.host_bytes, found.host_cores, found.measured) == (None, 32, None)


def test_processes_and_json(tmp_path):
    assert read_cluster(written(tmp_path, "{nodes: 1, per_node: 2, gpu: CPU}")).gpu is None
    assert read_cluster(written(tmp_path, '{"nodes": 1, "per_node": 2, "gpu": null}', "a.json")).gpu is None


def test_a_name_that_ends_as_a_file_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_cluster(find_cluster("2xp5.48xlarge"), tmp_path / "big.yaml")
    assert find_cluster("big.yaml") == find_cluster("2xp5.48xlarge")
    assert find_cluster(f" {tmp_path}/big.yaml ") == find_cluster("big.yaml")
    job = read_job(None, text="model: m\ndata: d.jsonl\ncluster: big.yaml\n")
    assert job.cluster == "big.yaml"
    with pytest.raises(BadInput) as caught:
        find_cluster("bog.yaml")
    assert "there is no such file; did you mean 'big.yaml'?" in str(caught.value)


def test_what_is_written_can_be_read_by_people(tmp_path):
    """A known card stands there by its name, points of a curve on one line each, and what is not known not at all."""
    curve = Curve(points=((1024.0, 1e-5), (2048.0, 2e-5)), source="here")
    device = DeviceSpeeds(products={"bf16": curve}, memory={"fp32": curve}, issue_s=1e-6)
    found = find_cluster("8xA10").model_copy(update={"measured": Measured(device=device, source="today")})
    write_cluster(found, tmp_path / "a.yaml")
    lines = (tmp_path / "a.yaml").read_text().splitlines()
    assert lines[0].startswith("# A cluster for shardwise")
    assert lines[2:6] == ["name: 8xA10", "nodes: 1", "per_node: 8", "gpu: A10"]
    assert "        - [1024.0, 1.0e-05]" in lines
    assert not [line for line in lines if "null" in line or "host" in line]


def test_a_card_that_differs_from_the_catalogue_is_written_whole(tmp_path):
    card = gpu("A10")
    measured = card.model_copy(update={"usable": Sourced(bytes=23_000_000_000, source="this machine")})
    found = find_cluster("2xA10").model_copy(update={"gpu": measured})
    write_cluster(found, tmp_path / "a.yaml")
    assert "  name: A10\n" in (tmp_path / "a.yaml").read_text()
    assert read_cluster(tmp_path / "a.yaml").gpu.usable.bytes == 23_000_000_000


def test_nothing_is_written_over(tmp_path):
    path = written(tmp_path, "mine\n")
    with pytest.raises(BadInput) as caught:
        write_cluster(find_cluster("8xA10"), path)
    assert "is there already" in str(caught.value)
    assert path.read_text() == "mine\n"


@pytest.mark.parametrize(
    ("name", "said"), [("a.txt", "allowed: .yaml, .yml, .json"), ("no/a.yaml", "cannot be written")]
)
def test_names_that_cannot_be_written(tmp_path, name, said):
    with pytest.raises(BadInput) as caught:
        write_cluster(find_cluster("8xA10"), tmp_path / name)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "field", "line", "said"),
    [
        ("per_node: 2\n", "nodes", None, "is missing"),
        ("nodes: 0\nper_node: 2\n", "nodes", 1, "has to be greater than 0"),
        ("nodes: two\nper_node: 2\n", "nodes", 1, "'two': has to be a valid integer"),
        ("nodes: 1\nper_node: 2\nhost_core: 4\n", "host_core", 3, "did you mean 'host_cores'?"),
        ("nodes: 1\nper_node: 2\ngpu: A11\n", "gpu", 3, "did you mean 'A10'?"),
        ("nodes: 1\nper_node: 2\ngpu: A100\n", "gpu", 3, "is the name of 4 cards"),
        ("nodes: 1\nper_node: 2\ngpu: [A10]\n", "gpu", 3, "cpu, or a card given whole"),
        ("nodes: 1\nper_node: 2\ngpu: {name: X, usable: 80}\n", "gpu.usable", 3, "has to be a mapping of keys"),
        ("nodes: 1\nper_node: 2\ngpu:\n  name: X\n", "gpu.usable", 3, "is missing"),
        ("nodes: 2\nper_node: 2\ngpu: A10\nnetwork: roc-25\n", "network", 4, "did you mean 'roce'?"),
        ("", "mine.yaml", None, "it needs at least 'nodes' and 'per_node'"),
        ("nodes: 1\nper_node: 2\nnodes: 2\n", "nodes", 3, "is given twice"),
        ("nodes: 1\nper_node: 2\nmeasured: {source: x, device: {products: {}, memory: {source: x, points: []}}}\n",
         "measured.device.issue_s", 3, "is missing"),
        ("nodes: 1\nper_node: 1\nhost_bytes: .nan\n", "host_bytes", 3, "has to be"),
    ],
)  # fmt: skip
def test_errors_name_the_field_and_the_line(tmp_path, text, field, line, said):
    found = [one for one in refusal(written(tmp_path, text)) if one.field.split(": ")[-1].split("/")[-1] == field]
    assert found, refusal(written(tmp_path, text))
    assert found[0].line == line
    assert said in str(found[0])


WHOLE = """
nodes: 1
per_node: 8
host_bytes: {host_bytes}
gpu:
  name: X
  usable: {{bytes: {usable}, source: mine}}
  rates:
    products: {{fp32: {{value: {flops}, source: mine}}}}
    memory: {{value: {memory}, source: mine}}
    link: {{value: 300.0e+9, source: mine}}
    host: {{value: {host}, source: mine}}
    peer_to_peer: true
"""
RIGHT = {"host_bytes": 10**12, "usable": 80 * 10**9, "flops": "60.0e+12", "memory": "2.0e+12", "host": "31.5e+9"}


@pytest.mark.parametrize(
    ("figure", "value", "field", "said"),
    [
        ("host_bytes", 1000, "host_bytes", "write it in bytes: 80 GB are 80000000000"),
        ("usable", 80, "gpu.usable.bytes", "is too little to be bytes"),
        ("flops", "60.0", "gpu.rates.products.fp32.value", "312 TFLOPS are 312.0e+12"),
        ("memory", "2000.0", "gpu.rates.memory.value", "is too little to be bytes per second"),
        ("host", "31.5", "gpu.rates.host.value", "300 GB/s are 300.0e+9"),
    ],
)
def test_figures_in_gigabytes_and_teraflops_are_refused(tmp_path, figure, value, field, said):
    """Whoever writes 80 for 80 GB would get an answer that is off by 10^9."""
    assert read_cluster(written(tmp_path, WHOLE.format(**RIGHT))).gpu.name == "X"
    (problem,) = refusal(written(tmp_path, WHOLE.format(**{**RIGHT, figure: value})))
    assert problem.field.endswith(f": {field}")
    assert problem.line is not None
    assert said in str(problem)


def test_what_the_command_line_takes_a_file_takes_too(tmp_path):
    found = read_cluster(written(tmp_path, "nodes: 2\nper_node: 8\ngpu: 4090\nnetwork: IB-8X400\n"))
    assert found.gpu == gpu("RTX-4090")
    assert found.network == "ib-8x400"


def test_every_error_is_told_at_once(tmp_path):
    assert len(refusal(written(tmp_path, "nodes: 0\nper_node: -1\nwhat: 3\n"))) == 3


@pytest.mark.parametrize("name", string.ascii_lowercase[:3])
def test_characters_that_yaml_does_not_allow_survive(tmp_path, name):
    odd = {"a": "\x7f\x85", "b": "\u2028\ufeff", "c": "\x00\t\n"}[name]
    found = find_cluster("8xA10").model_copy(update={"name": f"x{odd}y"})
    for end in ("yaml", "json"):
        write_cluster(found, tmp_path / f"{name}.{end}")
        assert read_cluster(tmp_path / f"{name}.{end}") == found


def test_files_that_the_page_shows_are_clusters_with_a_step_time(tmp_path):
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    shown = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert len(shown) == 2
    for number, text in enumerate(shown):
        found = read_cluster(written(tmp_path, text, f"{number}.yaml"))
        job = read_job(None, ["model=llama-3.2-1b", "mixed_precision=bf16"], needs_data=False)
        assert by_estimate(plan_by_shape(job, find_model("llama-3.2-1b"), found)).timeline is not None
