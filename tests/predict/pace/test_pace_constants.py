"""The constants of computing time: few, bounded, explained, and each of them matters."""

from __future__ import annotations

import pytest

from predict.pace.pace_cases import A100, cluster
from shardwise.predict.constants import Constant
from shardwise.predict.pace import constants, pace_of
from shardwise.predict.pace.constants import CONSTANTS
from shardwise.predict.work import AttentionWork, Product, Work
from shardwise.spec.runtime import Runtime

WORK = Work(
    products=((Product(rows=2048, inner=4096, columns=4096, item=2), 1),),
    attention=((AttentionWork(flops=10**11, kernel="flash", backward=False, item=2, moved=10**7), 1),),
    moves=((10**8, 4),),
)


def test_all_are_listed():
    found = {name: value for name, value in vars(constants).items() if isinstance(value, Constant)}
    assert {constant.name: constant for constant in CONSTANTS} == found


@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda constant: constant.name)
def test_each_is_bounded_explained_and_of_effect(constant):
    assert 0 <= constant.low < constant.value < constant.high or constant.value in (constant.low, constant.high)
    assert len(constant.meaning.split()) > 5
    assert any(char.isdigit() for char in constant.source), "a source has a figure or a number"

    def times(value):
        here = pace_of(cluster(A100, nodes=2), Runtime(), compiled=False, values={constant.name: value})
        return here.seconds(WORK), here.issue(WORK), here.slowdown, here.host_adam(1e6)

    assert times(constant.low) != times(constant.high)
