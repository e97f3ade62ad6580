"""What the computation of a model holds: activations, recomputation, temporaries, weight gradients at work, logits.

No torch. A block is a short program, written like its class in transformers (`llama_like.block`), that runs on a tape
(`tape`): a model of torch's memory in which tensors are sizes, storages live as long as something refers to them, and
backward runs over nodes in autograd's order. Walking a program gives its highest instants, in half a millisecond;
results are remembered, and a second look costs about a microsecond.

    computed = computation(workload, runtime, device_type="cuda", generation="hopper")
    part = computed.block(plan, kind, checkpointing="full")               # PartMemory of ModelSpec.kinds[kind]
    part = computed.block(plan, kind, checkpointing="full", first=True)   # of the model's first block
    ends = computed.ends(plan)                                            # EndsMemory: all that is not a block

`computation` gives the same object for the same (workload, runtime) objects. `checkpointing` is what THIS block does:
`spec.layout.is_checkpointed(setting, index)` and `modes_of(setting)` say so of a plan's setting.

`PartMemory` and `EndsMemory` (`live`) count bytes of one rank and one micro-batch. With parts 0 (embedding), 1 .. L
(blocks), L + 1 (last norm, head and loss), the computation holds at the highest instant of part i

    forward      ends.shared + ends.in_forward + kept of parts < i + travelling of part i - 1 + forward.total
                 + ends.carried for 1 < i <= L, unless part 1 keeps its input
    backward     ends.shared + kept of parts < i + travelling of part i - 1 + backward.total
    evaluation   ends.in_evaluation + evaluation.total + ends.carried for 1 < i <= L

(`in_forward` for blocks alone, `shared` not for the embedding), the batch (`ends.inputs`) apart. `backward.gradients`
are the part's own whole weight gradients that have arrived by then; what becomes of them when the part is done is the
sharding's. `carried` is what the decoder's variable `inputs_embeds` holds.
"""

from shardwise.predict.blocks.live import EndsMemory, Live, PartMemory
from shardwise.predict.blocks.memory import Computation, computation, modes_of

__all__ = ["Computation", "EndsMemory", "Live", "PartMemory", "computation", "modes_of"]
