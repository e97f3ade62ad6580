"""Cards by the names that people type: `A10`, `H100-SXM-80GB`, `NVIDIA A100-SXM4-80GB`, `4090`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Annotated, Literal

from pydantic import Field

from shardwise.catalogue.data import read_data
from shardwise.catalogue.rates import CardRates
from shardwise.spec.cluster import Gpu, Sourced
from shardwise.spec.problems import BadInput, Problem, did_you_mean
from shardwise.spec.strict import PositiveInt, Strict

MIB = 2**20

DRIVER_KEEPS_MIB = 450
"""What CUDA does not report of a card's memory, whatever its size."""
DRIVER_KEEPS_SHARE = 0.0025
"""And of each byte of it."""

_VENDOR_WORDS = {"nvidia", "geforce", "tesla", "amd", "instinct", "generation", "gpu"}
_SOCKET = re.compile(r"sxm\d?")
_GIGABYTES = re.compile(r"(\d+)(g|gb|gib)")


class Card(Strict):
    """One entry of `gpus.yaml`."""

    other_names: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """What people type; a name that stands at several cards is ambiguous."""
    device_names: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """What CUDA calls it, where that is none of the names."""
    label_gb: PositiveInt
    """What it is sold with."""
    link: Literal["nvlink", "xgmi", "pcie"]
    """Between the cards of a node."""
    cuda_mib: PositiveInt | None = None
    """Total that CUDA reports to a program."""
    smi_mib: PositiveInt | None = None
    """Total that nvidia-smi shows."""
    source: str
    """Of the first of these two that is known."""
    rates: CardRates
    """What it can do."""


def cuda_visible(smi_mib: int) -> int:
    """Return the total that CUDA reports, in MiB, of a card whose nvidia-smi shows `smi_mib`.

    450 MiB and 0.25 %: within 0.3 % of every card newer than the V100 of which both are known, 24 to 284 GB.
    """
    return round(smi_mib - DRIVER_KEEPS_MIB - DRIVER_KEEPS_SHARE * smi_mib)


@cache
def cards() -> dict[str, Card]:
    """Return every card by its name in the catalogue."""
    return {name: Card.model_validate(entry) for name, entry in read_data("gpus.yaml").items()}


def gpu(name: str) -> Gpu:
    """Return the card that the catalogue holds under exactly this name."""
    card = cards()[name]
    if card.cuda_mib is not None:
        usable = Sourced(bytes=card.cuda_mib * MIB, source=card.source)
    else:
        assert card.smi_mib is not None
        rule = f"{card.source}, {card.smi_mib} MiB, less what the driver keeps (450 MiB and 0.25 %)"
        usable = Sourced(bytes=cuda_visible(card.smi_mib) * MIB, source=rule)
    return Gpu(name=name, usable=usable, link=card.link, rates=card.rates.rates())


def find_gpu(text: str, *, field: str = "cluster") -> Gpu:
    """Return the card that people mean by `text`, such as `a100-80gb`, `NVIDIA A100-SXM4-80GB` or `4090`.

    Raises:
        BadInput: no such card, with the nearest name; several cards of that name, with all of them.
    """
    found = _by_words().get(_words(text), ())
    if len(found) == 1:
        return gpu(found[0])
    if found:
        reason = f"is the name of {len(found)} cards of different memory or links"
        raise BadInput(Problem(field=field, value=text, reason=reason, allowed=", ".join(found)))
    raise unknown(text, field, "is not a card of the catalogue", spellings())


def find_device(device_name: str, total_bytes: int) -> Gpu | None:
    """Return the card that CUDA calls `device_name` and that has a total of about `total_bytes`; None: not here.

    One name may stand for several cards (an RTX 4090 rebuilt with 48 GB); the nearest memory tells.
    """
    wanted = _words(device_name)
    names = [name for name, card in cards().items() if wanted in map(_words, (name, *card.other_names))]
    names += [name for name, card in cards().items() if wanted in map(_words, card.device_names)]
    found = [gpu(name) for name in dict.fromkeys(names)]
    return min(found, key=lambda card: abs(card.usable.bytes - total_bytes), default=None)


def is_card(text: str) -> bool:
    """Tell whether `text` is the name of a card, or of several."""
    return _words(text) in _by_words()


def unknown(text: str, field: str, reason: str, choices: Iterable[str]) -> BadInput:
    """Return the refusal of a name that is none of `choices`, with the nearest of them, else with all cards."""
    near = did_you_mean(_spelled(text), choices)
    allowed = "" if near else ", ".join(cards())
    return BadInput(Problem(field=field, value=text, reason=reason, allowed=allowed, fix=near))


def _words(text: str) -> frozenset[str]:
    """Return what tells one card's name from another's, whatever the order, case and separators."""
    words = set()
    for word in re.findall(r"[a-z0-9]+", text.lower()):
        plain = word.removeprefix("rtx")
        if word in _VENDOR_WORDS or not plain:
            continue
        size = _GIGABYTES.fullmatch(plain)
        words.add(f"{size[1]}gb" if size else "sxm" if _SOCKET.fullmatch(plain) else plain)
    return frozenset(words)


@cache
def _by_words() -> dict[frozenset[str], tuple[str, ...]]:
    """Return every name's words -> the cards that it may mean."""
    found: dict[frozenset[str], tuple[str, ...]] = {}
    for name, card in cards().items():
        for words in dict.fromkeys(map(_words, (name, *card.other_names))):
            found[words] = (*found.get(words, ()), name)
    return found


def _spelled(text: str) -> str:
    return "-".join(word for word in re.findall(r"[a-z0-9]+", text.lower()) if word not in _VENDOR_WORDS)


def spellings() -> Iterable[str]:
    """Yield every name that means one card."""
    for name, card in cards().items():
        yield from (one for one in (name, *card.other_names) if len(_by_words()[_words(one)]) == 1)
