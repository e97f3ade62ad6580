"""The parameters of a model as its programs read them."""

from __future__ import annotations

from typing import Protocol

from shardwise.predict.adapted import Adapted, Scope, adapted_model
from shardwise.predict.blocks.norms import Norm
from shardwise.predict.blocks.setting import Layers, Site
from shardwise.predict.unit_split import Split
from shardwise.spec.method import Lora
from shardwise.spec.model_spec import BlockKind, ModelSpec
from shardwise.spec.problems import BadInput, Problem


class Naming(Protocol):
    """What a family says about its parameters."""

    @property
    def transposed(self) -> bool:
        """Weights are [inputs, outputs] (GPT-2's Conv1D)."""

    @property
    def norm(self) -> Norm:
        """Kind of its norms."""

    @property
    def activation(self) -> tuple[str, str]:
        """Field of the activation function, and its default."""

    @property
    def always_masked(self) -> bool:
        """Fused attention is always given a mask."""

    @property
    def cap(self) -> float | None:
        """Soft cap of scores and logits where the configuration does not say."""


class Weights:
    """A model with its adapters on one rank of a tensor axis."""

    def __init__(self, model: ModelSpec, lora: Lora | None, ranks: int, naming: Naming) -> None:
        """Read it.

        Raises:
            BadInput: adapters or a tensor axis that the model does not take; different adapters in blocks of one kind.
        """
        self._model, self._lora, self._ranks, self._naming = model, lora, ranks, naming
        self._split = Split(model, ranks)
        adapted: Adapted = adapted_model(model, lora, tensor=ranks)
        self.kinds = [self._kind(adapted, place) for place in range(len(model.kinds))]
        self.outside = self._layers(adapted.outside, model.kinds[0], "")
        if model.tied and f"{model.head}.weight" not in self.outside.sizes:
            self._tie(self.outside)

    def _kind(self, adapted: Adapted, place: int) -> Layers:
        variants = [scope for scope, kind in zip(adapted.variants, adapted.kinds, strict=True) if kind == place]
        if len(variants) > 1:
            raise BadInput(
                Problem(
                    field="lora_targets",
                    reason="blocks of one kind have different adapters, which has no formula",
                    fix="use --by trace",
                )
            )
        return self._layers(variants[0], self._model.kinds[place], f"{self._model.block_list}.*.")

    def _layers(self, scope: Scope, kind: BlockKind, prefix: str) -> Layers:
        shapes: dict[str, tuple[int, ...]] = {}
        trained: set[str] = set()
        ranks: dict[str, int] = {}
        for parameter in scope.parameters:
            name = parameter.name
            if any(name.startswith(f"{outer}.") for outer in scope.unreached):
                continue
            if ".lora_A." in name:
                ranks[name.partition(".lora_A.")[0]] = parameter.shape[0]
            elif ".lora_B." not in name:
                plain = name.replace(".base_layer", "").replace(".modules_to_save.default", "")
                shapes[plain] = parameter.shape
                if parameter.trained:
                    trained.add(plain)
        return Layers(
            kind=kind,
            hidden=self._model.hidden,
            sites=self._sites(shapes, ranks, prefix),
            sizes={name: _elements(shape) for name, shape in shapes.items()},
            trained=trained,
            dropout=self._lora.dropout if self._lora is not None else 0.0,
            norm=self._naming.norm,
            activation=self._activation(),
            masked=self._naming.always_masked,
            cap=self._naming.cap,
            config=self._model.config,
        )

    def _sites(self, shapes: dict[str, tuple[int, ...]], ranks: dict[str, int], prefix: str) -> dict[str, Site]:
        sites: dict[str, Site] = {}
        for full, shape in shapes.items():
            name, _, last = full.rpartition(".")
            if last != "weight" or len(shape) != 2:
                continue
            inputs, outputs = shape if self._naming.transposed and prefix else shape[::-1]
            sites[name] = Site(
                inputs=inputs,
                outputs=outputs,
                bias=f"{name}.bias" in shapes,
                rank=ranks.get(name, 0),
                word=self._split.word(prefix + name),
            )
        return sites

    def _tie(self, outside: Layers) -> None:
        """Give the head the embedding's weight."""
        model = self._model
        table, name = f"{model.embedding}.weight", f"{model.head}.weight"
        outside.sizes[name] = outside.sizes[table]
        if table in outside.trained:
            outside.trained.add(name)
        outside.sites[model.head] = Site(
            inputs=model.hidden,
            outputs=model.vocab,
            bias=False,
            rank=0,
            word=self._split.word(model.head),
        )

    def _activation(self) -> str:
        field, default = self._naming.activation
        return str(self._model.config.get(field) or default)


def _elements(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
