"""What the computation of a model holds: activations, recomputation, temporaries, weight gradients at work, logits.

No torch. A block is a short program, written like its class in transformers (`llama_like.block`), that runs on a tape
(`tape`): a model of torch's memory in which tensors are sizes, storages live as long as something refers to them, and
backward runs over nodes in autograd's order. Walking the program gives the highest instants exactly, about half a
millisecond a walk; results are remembered, a second look costs about a microsecond.

    from shardwise.predict.blocks import computation

    computed = computation(workload, runtime, device_type="cuda")     # remembered per (workload object, runtime, device)
    part = computed.block(plan, kind, checkpointing="full")           # PartMemory of one block of ModelSpec.kinds[kind]
    part = computed.block(plan, kind, checkpointing="full", first=True)   # the model's first block: under LoRA, where no
                                                                      # gradient flows into its input, it keeps less
    ends = computed.ends(plan)                                        # EndsMemory: all that is not a block

    checkpointing: "none" | "full" | "selective" | "every_second_matmul" (torchtitan's) of THIS block; every_<k> is the
    caller's: `is_checkpointed(setting, index)` says which blocks are, `modes_of(plan)` both modes of a plan's setting.

PartMemory (`live.PartMemory`), all bytes of one rank and one micro-batch:

    kept            device bytes between a part's forward and its backward; its input where backward needs it, its
                    output not (that is the next part's input)
    travelling      with plan.offload.activations: bytes that go to the host. On the device, beside `kept`, until the
                    NEXT part's forward is over; again from the start of the NEXT part's backward (fetched ahead)
    keeps_input     its input is among `kept`
    output          bytes of its output
    input_gradient  bytes of the gradient that it hands down
    forward, backward, evaluation: Live(activations, recomputed, temporaries, gradients, logits), .total
                    the highest instant inside, above what the parts BEFORE it keep. `forward` holds its input and
                    output; `backward` holds what the part itself keeps (and what of it is still alive), the gradient
                    of its output, and `gradients`: the part's own whole weight gradients that have arrived by then, in
                    the dtype of the computation

So with parts 0 (embedding), 1..L (blocks), L+1 (final norm, head, loss), at the highest instant of part i

    forward:   ends.shared + ends.in_forward + sum(kept of parts < i) + travelling of part i-1 + part[i].forward.total
               + ends.carried for i > 1, unless part[1].keeps_input: the decoder's variable `inputs_embeds` holds it
    backward:  ends.shared + sum(kept of parts < i) + travelling of part i-1 + part[i].backward.total
               + gradients of weights of parts > i that the sharding still holds (the caller's: FSDP terms)
    evaluation: ends.in_evaluation + part[i].evaluation.total + ends.carried for i > 1

(`in_forward` only for blocks; `shared` not for the embedding.)

`EndsMemory`: `shared` (rotary tables and masks, alive from the first block's forward to the end of its backward),
`in_forward` (masks that only forward needs: until the last block's forward is over),
`embedding` and `head` as PartMemory. `head.forward` is final norm, head and loss; `head.backward` their backward, with
the gradient of the head's weight in `gradients`. `embedding.backward` has the embedding's whole gradient in `gradients`.
Batches themselves (`input_ids`, `attention_mask`, `labels`: 24 bytes a token) are `ends.inputs`.

Unknown `model_type`: BadInput, which points to `--by trace`.
"""

from shardwise.predict.blocks.live import EndsMemory, Live, PartMemory
from shardwise.predict.blocks.memory import Computation, computation, is_checkpointed, modes_of

__all__ = ["Computation", "EndsMemory", "Live", "PartMemory", "computation", "is_checkpointed", "modes_of"]
