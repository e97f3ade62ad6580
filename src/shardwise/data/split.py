"""Hold rows out so that no question that is asked of the model later was trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from shardwise.spec.problems import BadInput, Problem


def split_by_prompt(prompts: Sequence[str], *, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Return the indices of training rows and of held-out rows, each in ascending order and neither empty.

    `prompts[i]` is the prompt of row i; rows that share a prompt stay together. Prompts are taken in the order of a
    hash of prompt and `seed`, as long as they fit into `fraction` of the rows: the same rows in another order are split
    alike. When no prompt fits, the one with the fewest rows is held out. Raises BadInput when all rows share a prompt.
    """
    groups: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(index)
    if len(groups) < 2:
        reason = f"nothing can be held out: there is 1 distinct prompt in {_rows(len(prompts))}"
        fix = "name a second file with held-out rows, or leave held_out out"
        raise BadInput(Problem(field="data.held_out", value=fraction, reason=reason, fix=fix))
    wanted = max(1, round(fraction * len(prompts)))
    in_order = sorted(groups, key=lambda prompt: _draw(prompt, seed))
    held: list[int] = []
    for prompt in in_order[:-1]:
        if len(held) + len(groups[prompt]) <= wanted:
            held += groups[prompt]
    held = held or min((groups[prompt] for prompt in in_order), key=len)
    held_set = set(held)
    return [index for index in range(len(prompts)) if index not in held_set], sorted(held)


def _draw(prompt: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}:{prompt}".encode()).digest()


def _rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"
