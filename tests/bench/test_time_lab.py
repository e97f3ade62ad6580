"""The bench of step times: its figures, its plans, and the page that shows one run of it."""

from __future__ import annotations

import re
from statistics import median

import pytest
from time_lab import PLANS, Row, kendall_tau, settings_of, show, summary

from house.source import ROOT
from shardwise.spec.reader import read_job_dict

PAGE = (ROOT / "docs" / "time_lab.md").read_text(encoding="utf-8")
SECONDS = r"([\d.]+) s"
LINE = re.compile(
    rf"^\| (\d+) \| (.+?) \| {SECONDS} \| {SECONDS} \| ([\d.]+) \.\. {SECONDS} \| ([+-][\d.]+)% \|$", re.MULTILINE
)


def _row(predicted: float, measured: float, plan: str = "FULL_SHARD") -> Row:
    return Row(
        plan=plan,
        mbit_per_s=200,
        predicted_s=predicted,
        measured_s=measured,
        fastest_s=measured - 0.01,
        slowest_s=measured + 0.01,
        exposed_s=0.1,
    )


def test_tau_counts_pairs_in_order_less_pairs_out_of_order():
    """Of the 3 pairs of 1, 2, 3 against 1, 3, 2 two are in order and one is not; a tie is neither."""
    assert kendall_tau([(1, 1), (2, 2), (3, 3)]) == 1
    assert kendall_tau([(1, 1), (2, 3), (3, 2)]) == pytest.approx(1 / 3)
    assert kendall_tau([(1, 3), (2, 2), (3, 1)]) == -1
    assert kendall_tau([(1, 1), (1, 2)]) == 0


def test_errors_are_relative_to_what_was_measured():
    """1.1 for 1 is 10 % too long, 3 for 4 is 25 % too short: 17.5 % in the middle of the two."""
    found = summary([_row(1.1, 1.0), _row(3.0, 4.0)])
    assert found["median_error"] == pytest.approx(0.175)
    assert found["largest_error"] == pytest.approx(-0.25)
    assert (found["plans"], found["kendall_tau"]) == (2, 1)


def test_every_plan_is_a_job_of_its_own():
    jobs = [read_job_dict({"model": "m", "data": "rows.jsonl", **settings_of(name)}) for name in PLANS]
    assert len(jobs) == len({job.model_dump_json() for job in jobs}) >= 6


def test_what_is_printed_is_what_the_page_has(capsys):
    rows = [_row(1.1, 1.0)]
    show(rows, summary([*rows, _row(3.0, 4.0)]))
    printed = capsys.readouterr().out
    assert LINE.findall(printed) == [("200", "FULL_SHARD", "1.10", "1.00", "0.99", "1.01", "+10.0")]
    assert all(line in PAGE for line in printed.splitlines()[:2])


def test_the_page_says_what_its_table_says():
    rows = LINE.findall(PAGE)
    assert {(rate, plan) for rate, plan, *_ in rows} == {(rate, plan) for rate in ("200", "1000") for plan in PLANS}
    errors = [float(row[-1]) for row in rows]
    tau = kendall_tau([(float(predicted), float(measured)) for _, _, predicted, measured, *_ in rows])
    said = re.search(r"(\d+) plans: the median error is ([\d.]+) %, the largest (-[\d.]+) %", PAGE)
    assert said.groups() == (str(len(rows)), f"{median(map(abs, errors)):.1f}", f"{max(errors, key=abs):.1f}")
    assert median(map(abs, errors)) <= 10
    assert tau == pytest.approx(float(re.search(r"Kendall's tau is (\d\.\d+)", PAGE)[1]), abs=0.01)
    for _, _, _, measured, fastest, slowest, _ in rows:
        assert float(fastest) <= float(measured) <= float(slowest)
