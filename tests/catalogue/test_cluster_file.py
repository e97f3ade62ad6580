"""Clusters as files: written, read back equal, and refused by the field."""

from __future__ import annotations

import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.catalogue.cluster_file import read_cluster, write_cluster
from shardwise.catalogue.clusters import cards, find_cluster, gpu
from shardwise.spec.cluster import Cluster, Figure, Gpu, Rates, Sourced
from shardwise.spec.curve import Curve
from shardwise.spec.problems import BadInput
from shardwise.spec.reader import read_job
from shardwise.spec.speeds import CollectiveSpeed, DeviceSpeeds, HostSpeeds, Measured

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
POSITIVE = st.floats(1e-9, 1e18)
COUNT = st.integers(1, 2**50)
FIGURES = st.builds(Figure, value=POSITIVE, source=WORDS)
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
    usable=st.builds(Sourced, bytes=COUNT, source=WORDS),
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
    host_bytes=st.none() | COUNT,
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
        ("nodes: 1\nper_node: 2\ngpu: A11\n", "gpu", None, "did you mean 'A10'?"),
        ("nodes: 1\nper_node: 2\ngpu: A100\n", "gpu", None, "is the name of 4 cards"),
        ("nodes: 1\nper_node: 2\ngpu:\n  name: X\n", "gpu.usable", 3, "is missing"),
        ("nodes: 2\nper_node: 2\ngpu: A10\nnetwork: roc-25\n", "network", None, "did you mean 'roce'?"),
        ("nodes: 1\nper_node: 2\nnodes: 2\n", "nodes", 3, "is given twice"),
        ("nodes: 1\nper_node: 2\nmeasured: {source: x, device: {products: {}, memory: {source: x, points: []}}}\n",
         "measured.device.issue_s", 3, "is missing"),
        ("nodes: 1\nper_node: 1\nhost_bytes: .nan\n", "host_bytes", 3, "has to be"),
    ],
)  # fmt: skip
def test_errors_name_the_field_and_the_line(tmp_path, text, field, line, said):
    found = [problem for problem in refusal(written(tmp_path, text)) if problem.field.split(": ")[-1] == field]
    assert found, refusal(written(tmp_path, text))
    assert found[0].line == line
    assert said in str(found[0])


def test_every_error_is_told_at_once(tmp_path):
    assert len(refusal(written(tmp_path, "nodes: 0\nper_node: -1\nwhat: 3\n"))) == 3


@pytest.mark.parametrize("name", string.ascii_lowercase[:3])
def test_characters_that_yaml_does_not_allow_survive(tmp_path, name):
    odd = {"a": "\x7f\x85", "b": "\u2028\ufeff", "c": "\x00\t\n"}[name]
    found = find_cluster("8xA10").model_copy(update={"name": f"x{odd}y"})
    for end in ("yaml", "json"):
        write_cluster(found, tmp_path / f"{name}.{end}")
        assert read_cluster(tmp_path / f"{name}.{end}") == found
