"""A Plan on a model: loading, sharding, precision, checkpointing, offload, optimizer, loss, clipping, read-back."""
