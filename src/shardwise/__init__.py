"""shardwise: which FSDP configuration fits my GPUs and hides its communication?"""

import logging

for _name in (
    "torchao",  # says at import which of its GPU kernels do not load
    "torch.utils._pytree",  # says at import what torchao registers in an old way
    "torch.distributed.tensor._redistribute",  # says of every gathered weight that two axes split it
):
    logging.getLogger(_name).setLevel(logging.ERROR)


__version__ = "0.1.0"
