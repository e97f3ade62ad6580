"""What the parts of a model hold at their highest instants."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.predict.blocks.tape import ACTIVATION, GRADIENT, LOGITS, RECOMPUTED, TEMPORARY
from shardwise.predict.work import PartWork


@dataclass(frozen=True, slots=True)
class Live:
    """Bytes that the computation of a part holds at one instant, by what they are for."""

    activations: int = 0
    """What backward needs, made in forward."""
    recomputed: int = 0
    """What backward needs, made again in backward."""
    temporaries: int = 0
    """All else: results on their way to the next operation, gradients of activations, scratch of kernels."""
    gradients: int = 0
    """Whole gradients of weights that have arrived, in the dtype of the computation."""
    logits: int = 0
    """Logits, their copies in fp32, log-probabilities, and their gradients."""

    @property
    def total(self) -> int:
        """All together."""
        return self.activations + self.recomputed + self.temporaries + self.gradients + self.logits


def live_of(counts: list[int]) -> Live:
    """Return a tape's counts by name."""
    return Live(counts[ACTIVATION], counts[RECOMPUTED], counts[TEMPORARY], counts[GRADIENT], counts[LOGITS])


@dataclass(frozen=True, kw_only=True, slots=True)
class PartMemory:
    """What one part of a model (a block; embedding; final norm, head and loss) holds, above what parts before it keep.

    The gradients of its weights are counted as long as the part is at work; what becomes of them then is not its own.
    """

    kept: int
    """Bytes on the device between its forward and its backward: its input where backward needs it, its output not."""
    travelling: int
    """With activation offload, bytes that go to the host: on the device until the next part's forward is over, and
    again from the beginning of the next part's backward. Not part of `kept`."""
    keeps_input: bool
    """Its input is among what it keeps."""
    output: int
    """Bytes of its output, held until the next part is done with it."""
    input_gradient: int
    """Bytes of the gradient that it hands to the part before it; 0: none flows further."""
    forward: Live
    """The highest instant of its forward, input and output included."""
    backward: Live
    """The highest instant of its backward, with what it keeps and the gradient of its output; empty where no gradient
    reaches it."""
    evaluation: Live
    """The highest instant of its forward without gradients."""
    work: PartWork
    """What it computes for one micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndsMemory:
    """What the model holds outside its blocks."""

    inputs: int
    """Token ids, mask and labels of a micro-batch."""
    shared: int
    """What every block is given beside its input and backward needs: rotary tables, masks. Alive from the first block's
    forward to the end of its backward."""
    in_forward: int
    """What only forward holds, such as a mask that is added to scores: from the first block to the end of the last."""
    in_evaluation: int
    """`shared` and `in_forward` together in a forward without gradients."""
    carried: int
    """Bytes of the first block's input that a variable of the decoder holds through all other blocks' forward. They are
    counted already where the first block keeps its input."""
    embedding: PartMemory
    """From token ids to the first block's input."""
    head: PartMemory
    """Last norm, head and loss."""
