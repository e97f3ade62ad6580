"""Entry for torchrun: `torchrun --nproc_per_node=8 train.py config.yaml [key=value ...]`."""

import sys

from shardwise.cli.rank import leave, main_from_config

if __name__ == "__main__":
    leave(main_from_config(sys.argv[1:]))
