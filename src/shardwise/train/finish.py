"""After the last step: exports, and the check of them in a fresh process."""

from __future__ import annotations

import torch.distributed as dist

from shardwise.train.loop import Outcome, Training


def finish(training: Training, outcome: Outcome) -> int:
    if dist.get_rank() == 0:
        training.folder.set_status("finished", outcome.step)
        print(f"held-out loss: {outcome.last_loss} (before: {outcome.first_loss})")
    dist.destroy_process_group()
    return 0
