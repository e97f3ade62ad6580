"""What tensor parallelism splits, by formula: the same decisions as `engine.tp_plan`, without the model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.spec.model_spec import ModelSpec, Module, Tensor
from shardwise.spec.problems import BadInput, Problem

KNOWN = (
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "rowwise_split_input",
    "embedding_rowwise",
    "replicated_with_grad_allreduce",
)
"""Words of transformers' plans that the engine honours."""

COLUMN, ROW = KNOWN[:2], KNOWN[2:4]

_SPLIT_BY_HEAD = ("gpt_neox",)
"""Model types whose fused projection splits by heads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Site:
    """A module with parameters of its own; name in the plain model, `*` for the number of a block."""

    name: str
    kind: str
    tensors: tuple[Tensor, ...]

    @property
    def sizes(self) -> tuple[int, int]:
        """Outputs and inputs of a linear layer."""
        return self.tensors[0].shape[0], self.tensors[0].shape[1]


class Split:
    """Dim of every parameter that is split over the tensor axis."""

    def __init__(self, model: ModelSpec, ranks: int) -> None:
        """Decide it.

        Args:
            model: The plain model.
            ranks: Ranks of the tensor axis.

        Raises:
            BadInput: a structure that cannot be split correctly, or sizes that `ranks` does not divide.
        """
        self._model, self._ranks = model, ranks
        self._words: dict[str, str] = {}
        if ranks > 1:
            per_kind = [_sites(kind.modules, kind.tensors, f"{model.block_list}.*.") for kind in model.kinds]
            outside = _sites(model.modules, model.outside, "")
            sites = {site.name: site for group in (outside, *per_kind) for site in group}
            self._words = self._decide(sites, per_kind)
            for inside in per_kind:
                self._refuse_unsafe(inside)
            self._check_sizes(sites)

    def dim(self, name: str) -> int | None:
        """Return the dim of a parameter that is split; None: it is whole on every rank.

        Args:
            name: Its name in the model, `*` for the number of a block, PEFT's parts included.
        """
        owner, _, last = name.rpartition(".")
        layer, _, half = owner.partition(".lora_")
        word = self._words.get(layer.removesuffix(".base_layer"))
        if word in COLUMN:
            return None if half.startswith("A") else 0
        if word in ROW:
            return None if half.startswith("B") or last == "bias" else 1
        return 0 if word == "embedding_rowwise" else None

    def word(self, name: str) -> str | None:
        """Return the word of the plan for a module; None: it has none."""
        return self._words.get(name)

    def _decide(self, sites: Mapping[str, _Site], per_kind: list[list[_Site]]) -> dict[str, str]:
        model = self._model
        unknown = sorted({word for word in model.tensor_rules.values() if word not in KNOWN})
        if unknown:
            raise self._refused(f"its plan says {', '.join(unknown)}, which is not supported")
        words = {name: word for name, word in model.tensor_rules.items() if name in sites or name == model.head}
        if not any(name.startswith(f"{model.block_list}.*.") for name in words):
            for inside in per_kind:
                words |= self._derived(inside)
        self._settle_vocabulary(words)
        return words

    def _derived(self, inside: list[_Site]) -> dict[str, str]:
        """Split whole activations at attentions, and MLPs of two layers between them; see `engine.tp_plan`."""
        groups: dict[str, list[_Site]] = {}
        for site in inside:
            holder = self.container(site.name) or site.name.rpartition(".")[0]
            groups.setdefault(holder, []).append(site)
        words: dict[str, str] = {}
        for group in groups.values():
            linears = [site for site in group if site.kind.endswith("Linear")]
            inner = self._inner_width(group, linears)
            for site in linears:
                outputs, inputs = site.sizes
                if inner is not None:
                    words[site.name] = "rowwise" if inputs == inner else "colwise"
                else:
                    last = site is linears[-1] and outputs == self._model.hidden
                    words[site.name] = "rowwise_split_input" if last else "colwise_gather_output"
        odd = [s.name for s in inside if s.name not in words and any(len(t.shape) > 1 for t in s.tensors)]
        if odd or not words:
            reason = f"{odd[0]} is not a plain linear layer" if odd else "its blocks hold no linear layers"
            raise self._refused(f"transformers has no plan for it, and {reason}")
        return words

    def _inner_width(self, group: list[_Site], linears: list[_Site]) -> int | None:
        hidden = self._model.hidden
        shapes = [site.sizes for site in linears]
        backs = [inputs for outputs, inputs in shapes if outputs == hidden and inputs != hidden]
        if len(backs) != 1 or any(shape not in ((hidden, backs[0]), (backs[0], hidden)) for shape in shapes):
            return None
        others = [tensor for site in group if site not in linears for tensor in site.tensors]
        return None if any(backs[0] in tensor.shape for tensor in others) else backs[0]

    def _settle_vocabulary(self, words: dict[str, str]) -> None:
        """Split embedding and head by the vocabulary where it divides and both allow it, else keep them whole."""
        model = self._model
        embedding, head = model.embedding, model.head
        kind = next((module.kind for module in model.modules if module.name == embedding), "")
        if model.tied and head in words:
            words[embedding] = "embedding_rowwise"
        uneven = model.vocab % self._ranks != 0
        odd_embedding = kind != "Embedding" and embedding in words
        split = (words.get(head), words.get(embedding)) == ("colwise_gather_output", "embedding_rowwise")
        if uneven or odd_embedding or (model.tied and not split):
            for name in (embedding, head) if model.tied or uneven else (embedding,):
                if words.get(name) in ("embedding_rowwise", "colwise_gather_output"):
                    del words[name]

    def _refuse_unsafe(self, inside: list[_Site]) -> None:
        """Refuse what would train without an error on wrong gradients."""
        words = self._words
        groups: dict[str, list[_Site]] = {}
        for site in inside:
            if words.get(site.name) in COLUMN + ROW and site.kind != "Linear":
                raise self._refused(f"{site.name} is a {site.kind}, not a plain linear layer")
            groups.setdefault(self.container(site.name) or site.name, []).append(site)
        local = {self.container(site.name) for site in inside if words.get(site.name) == "colwise"}
        for holder, group in groups.items():
            if holder not in local:
                continue
            unnamed = [site.name for site in group if site.name not in words]
            if unnamed:
                reason = f"{unnamed[0]} works on a part of the heads or channels of {holder}, but its plan does not"
                raise self._refused(f"{reason} name it")
            rows = [site.sizes[1] for site in group if words[site.name] == "rowwise"]
            if not rows:
                raise self._refused(f"its plan splits the output of {group[0].name}, but nothing in {holder} joins it")
            for site in group:
                wide = words[site.name] == "colwise" and site.sizes[0] > max(rows)
                if wide and self._model.model_type not in _SPLIT_BY_HEAD:
                    raise self._refused(
                        f"{site.name} holds several projections in one, and a plain split would mix them"
                    )

    def _check_sizes(self, sites: Mapping[str, _Site]) -> None:
        sizes = {}
        for name, word in self._words.items():
            if name in sites and word in COLUMN + ROW:
                last = name.rpartition(".")[2]
                outputs, inputs = sites[name].sizes
                heads = self._heads(name, outputs) if word == "colwise" else None
                if heads is not None:
                    sizes[f"heads of {last}"] = heads
                elif word in COLUMN:
                    sizes[f"outputs of {last}"] = outputs
                else:
                    sizes[f"inputs of {last}"] = inputs
        wrong = [f"{what} ({size})" for what, size in sizes.items() if size % self._ranks]
        if wrong:
            common = math.gcd(*sizes.values())
            allowed = [ranks for ranks in range(1, common + 1) if common % ranks == 0]
            below = max(ranks for ranks in allowed if ranks < self._ranks or ranks == 1)
            raise BadInput(
                Problem(
                    field="mesh.tensor",
                    value=self._ranks,
                    reason=f"does not divide {', '.join(wrong)}",
                    allowed=", ".join(map(str, allowed)),
                    fix=f"set mesh.tensor to {below}",
                )
            )

    def _heads(self, name: str, outputs: int) -> int | None:
        """Return how many heads a projection of an attention holds; None for other layers."""
        holder = self.container(name)
        inner = (holder or "").removeprefix(f"{self._model.block_list}.*.")
        for kind in self._model.kinds:
            held = next((module.kind for module in kind.modules if module.name == inner), "")
            if inner and "Attention" in held:
                heads = outputs // kind.attention.head_dim
                return heads // 3 if heads == 3 * kind.attention.heads else heads
        return None

    def container(self, name: str) -> str | None:
        """Return the direct child of a block that holds a module; None elsewhere."""
        prefix = f"{self._model.block_list}.*."
        parts = name.removeprefix(prefix).split(".")
        return prefix + parts[0] if name.startswith(prefix) and len(parts) > 1 else None

    def _refused(self, reason: str) -> BadInput:
        kind = self._model.modules[0].kind if self._model.modules else self._model.model_type
        return BadInput(
            Problem(
                field="mesh.tensor",
                value=kind,
                reason=f"cannot be split over a tensor axis: {reason}",
                fix="remove mesh.tensor",
            )
        )


def refuse_sequence_parallel(model: ModelSpec, ranks: int) -> None:
    """Refuse a model that is not norms around an attention and an MLP, as `engine.tp_sequence` does.

    Dropout between the parts of a block, which the engine refuses too, is not looked at: a ModelSpec does not say it.

    Raises:
        BadInput: naming what does not fit.
    """
    split = Split(model, ranks)
    for kind in model.kinds:
        inside: dict[str, set[str | None]] = {}
        for site in _sites(kind.modules, kind.tensors, f"{model.block_list}.*."):
            holder = split.container(site.name)
            if holder is None:
                _check_norm(model, site, split)
            else:
                inside.setdefault(holder, set()).add(split.word(site.name))
        for holder, words in inside.items():
            if not words & set(COLUMN) or not words & set(ROW):
                raise _no_sequence(model, f"{holder} is not split into columns and rows")
    decoder = model.block_list.rpartition(".")[0]
    last = [
        site
        for site in _sites(model.modules, model.outside, "")
        if site.name.startswith(decoder + ".") and site.kind != "Embedding" and site.name != model.embedding
    ]
    for site in last:
        _check_norm(model, site, split)
    if len(last) != 1:
        names = ", ".join(site.name for site in last) or "none"
        raise _no_sequence(model, f"{decoder} has {len(last)} norms after its blocks ({names}), not one")


def _check_norm(model: ModelSpec, site: _Site, split: Split) -> None:
    flat = all(len(tensor.shape) == 1 for tensor in site.tensors)
    if split.word(site.name) is not None or "norm" not in site.kind.lower() or not flat:
        raise _no_sequence(model, f"{site.name} is a {site.kind}, not a norm, an attention or an MLP")


def _no_sequence(model: ModelSpec, reason: str) -> BadInput:
    kind = model.modules[0].kind if model.modules else model.model_type
    return BadInput(
        Problem(
            field="mesh.sequence_parallel",
            value=True,
            reason=f"{kind} cannot be split along the sequence: {reason}",
            fix="set mesh.sequence_parallel to false",
        )
    )


def _sites(modules: tuple[Module, ...], tensors: tuple[Tensor, ...], prefix: str) -> list[_Site]:
    """Return the modules with parameters of their own."""
    own: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        own.setdefault(tensor.name.rpartition(".")[0], []).append(tensor)
    return [
        _Site(name=prefix + module.name, kind=module.kind, tensors=tuple(own[module.name]))
        for module in modules
        if module.name in own
    ]


def generic(name: str) -> str:
    """Return a name with `*` for the numbers in it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
