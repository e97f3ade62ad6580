"""Memory of one training step by formula, apart from what the computation itself needs (`predict.blocks`).

`estimate` looks at a short list of instants of a step. At each it adds up what four parties keep alive:

    at rest        shards and optimizer states                 `ShardingTerms.at_rest`
    sharding       gathered weights, gradients, their buffers  `.gathered`, `.gradients`, `.reductions`
    the optimizer  temporaries of the update                   `.update`
    computation    activations, logits, temporaries, inputs    `predict.blocks`

and the highest sum of a phase is that phase's peak.

`ShardingTerms` (in `terms.instants`) is what a runtime can replace. `terms.fsdp2.Fsdp2Terms` is shardwise's own; those
of other programs subclass it, or are written anew, in `predict.runtimes`, whose `sharding_terms` the assembly asks.

The words:

`Live`        dict[Category, int]: bytes by category; what is not named is 0 (`terms.live`).
`UnitBytes`   one communication unit on rank 0, every figure in bytes (`terms.unit_bytes`): its shards, its gathered
              weights (as large is the buffer that gathers them), its gradients whole and sharded, the buffer that
              reduces them.
`Facts`       what terms are made from: plan, device type, the units in the order of forward, the root (`terms.facts`).
`At`          an instant: a moment, and the place of the unit at work in the order of forward; the root is ROOT.

Moments, in the order of a step:

    arrival        forward: a unit's weights are copied out of the gathered buffer; it has computed nothing
    forward        forward: it computes
    head           after the last unit's forward, inside the root's: the head makes logits (or, in pieces, the loss)
    loss           after the root's forward: whole logits become a loss, and the loss their gradient
    head_backward  backward of the head: the root's gradients begin to exist
    return         backward: a unit's weights are copied out again; none of its gradients exist
    backward       backward: it computes; its gradients come one by one beside its gathered weights
    reduction      backward: its gradients are copied into the buffer that is reduced; its weights are freed
    reduced        the buffer has become this rank's gradients, and is not freed yet
    deferred       the embedding's backward in a micro-batch whose gradients wait for the last one
    step           the optimizer updates
"""
