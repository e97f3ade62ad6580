"""The tape: lifetimes, order of backward, sums, checkpointed regions; and the kernels of attention."""

from __future__ import annotations

import pytest
import torch

from predict.blocks_truth import peak_of
from shardwise.predict.blocks import activations, norms, ops
from shardwise.predict.blocks.kernels import kernel_of, scratch, statistics
from shardwise.predict.blocks.tape import ACTIVATION, TEMPORARY, Leaf, Memory, Tape, Tensor

SIZE, ITEM = 1000, 4
"""Elements of a tensor, bytes of each."""


def start() -> tuple[Tape, Tensor]:
    """Return a tape and a tensor on it into which a gradient flows."""
    tape = Tape(Memory())
    return tape, tape.new(SIZE, ITEM, Leaf(TEMPORARY), ACTIVATION)


def units(tape: Tape) -> float:
    """Return the live bytes in tensors."""
    return tape.memory.now / (SIZE * ITEM)


def test_a_result_lives_as_long_as_its_variable():
    tape, x = start()
    made = ops.scale(tape, x)
    assert units(tape) == 2
    made = ops.scale(tape, made)
    assert units(tape) == 2
    del made
    assert units(tape) == 1
    assert tape.memory.peak == 3 * SIZE * ITEM


def test_what_is_saved_lives_until_its_backward():
    tape, x = start()
    made = ops.by_result(tape, ops.power(tape, ops.scale(tape, x)))
    assert units(tape) == 3  # x; the input of the power; the result
    root = made.node
    assert root is not None
    del made, x
    assert units(tape) == 2
    tape.backward(root, SIZE, ITEM)
    assert units(tape) == 1  # the gradient of x
    assert tape.memory.live[ACTIVATION] == 0


def peak_of_sums(viewed: bool) -> float:
    """Return the peak of adding up three gradients, in tensors."""
    tape, x = start()

    def branch() -> Tensor:
        return ops.scale(tape, ops.view(tape, x) if viewed else x)

    made = ops.add(tape, ops.add(tape, branch(), branch()), branch())
    root = made.node
    assert root is not None
    del made
    tape.memory.reset()
    tape.backward(root, SIZE, ITEM)
    return tape.memory.peak / (SIZE * ITEM)


def real_peak_of_sums(viewed: bool) -> float:
    """The same in torch."""

    def step() -> None:
        x = torch.randn(SIZE, requires_grad=True)

        def branch() -> torch.Tensor:
            return (x.view(SIZE) if viewed else x) * 2

        edge = torch.autograd.graph.get_gradient_edge(branch() + branch() + branch())
        torch.autograd.backward([edge], [torch.ones(SIZE)])

    return peak_of(step) / (SIZE * ITEM)


def test_gradients_are_added_in_place_unless_one_is_a_view():
    assert (peak_of_sums(viewed=False), peak_of_sums(viewed=True)) == (4, 5)
    assert real_peak_of_sums(viewed=True) - real_peak_of_sums(viewed=False) == pytest.approx(1, abs=0.01)


def test_a_checkpointed_region_stops_at_the_last_tensor_it_saved():
    tape, x = start()
    runs = []

    def run() -> Tensor:
        runs.append("begun")
        made = ops.by_result(tape, ops.scale(tape, x))
        runs.append("saved")
        made = ops.scale(tape, ops.scale(tape, made))
        runs.append("over")
        return made

    made = tape.checkpointed(run, "cuda")
    assert units(tape) == 2  # x and the result
    root = made.node
    assert root is not None
    del made
    tape.backward(root, SIZE, ITEM)
    assert runs == ["begun", "saved", "over", "begun"]


def test_no_gradient_no_history():
    tape = Tape(Memory())
    x = tape.new(SIZE, ITEM)
    assert ops.power(tape, x).node is None
    silent = Tape(Memory(), recording=False)
    assert ops.power(silent, silent.new(SIZE, ITEM, Leaf(TEMPORARY))).node is None


def test_norms_keep_what_they_keep():
    for made, saved in ((norms.rms, 2 + 1), (norms.gemma, 2 + 2), (norms.fused_rms, 1)):
        tape = Tape(Memory())
        x = tape.new(SIZE, 2, Leaf(TEMPORARY), ACTIVATION)
        out = made(tape, x, tape.parameter(100, 2, trains=True))
        kept = tape.memory.now - out.storage.size
        del x
        rows = SIZE // 100
        assert tape.memory.now - out.storage.size == pytest.approx(saved * SIZE * 2, abs=4 * (rows + 2 * 100)), made
        assert kept >= tape.memory.now - out.storage.size


@pytest.mark.parametrize(
    ("word", "saved"), [("silu", 1), ("gelu_pytorch_tanh", 1), ("relu", 1), ("relu2", 1), ("gelu_new", 4)]
)
def test_activations_keep_what_they_keep(word: str, saved: int):
    tape, x = start()
    out = activations.apply(tape, ops.scale(tape, x), word)
    del x
    result_is_saved = word == "relu"
    assert units(tape) - 1 == saved - result_is_saved
    assert out.elements == SIZE


def kernel(device: str = "cuda", generation: str = "ampere", **changes: object) -> str:
    """The kernel for plain half-precision attention, but for some changes."""
    given: dict[str, object] = {
        "item": 2,
        "widths": (128, 128),
        "same_heads": True,
        "grouped": True,
        "masked": False,
        "dropout": False,
    }
    return kernel_of(device, generation, **{**given, **changes})  # type: ignore[arg-type]


def test_kernels():
    assert kernel() == kernel(same_heads=False) == "flash"
    assert kernel(generation="hopper") == kernel(generation="blackwell", masked=True) == "cudnn"
    assert kernel(masked=True) == kernel(item=4) == kernel(widths=(192, 128)) == "efficient"
    assert kernel(generation="volta") == kernel(widths=(320, 320)) == "efficient"
    assert kernel(item=4, same_heads=False) == kernel(generation="turing", same_heads=False) == "math"
    assert kernel(same_heads=False, grouped=False) == kernel(widths=(126, 127)) == "math"
    assert kernel("cpu") == kernel("cpu", masked=True) == "cpu"
    assert kernel("cpu", dropout=True) == kernel("cpu", widths=(24, 16)) == "math"


def test_memory_of_kernels():
    sizes = {"rows": 2, "heads": 8, "length": 300, "widths": (80, 80), "item": 2}
    sums = 2 * 8 * 384 * (96 + 1) * 4
    assert scratch("flash", kv_heads=8, **sizes) == sums  # type: ignore[arg-type]
    assert scratch("flash", kv_heads=2, **sizes) == sums + 2 * 300 * 8 * 160 * 2  # type: ignore[arg-type]
    assert scratch("efficient", kv_heads=8, **sizes) == 2 * 8 * 300 * 81 * 4  # type: ignore[arg-type]
    assert scratch("cpu", kv_heads=8, **sizes) == scratch("math", kv_heads=8, **sizes) == 0  # type: ignore[arg-type]
    assert statistics("flash", 2, 8, 300) == 2 * 8 * 300
    assert statistics("efficient", 2, 8, 300) == 2 * 8 * 320
