"""A Plan on a model: loading, sharding, precision, loss, optimizer, read-back."""
