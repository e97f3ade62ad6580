"""From the units of a model to the facts that terms are made from."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.predict.terms.facts import Facts, PlacedUnit
from shardwise.predict.terms.unit_bytes import UnitBytes
from shardwise.predict.unit_rows import UnitKind, UnitTensor
from shardwise.spec.model_spec import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.problems import BadInput, Problem
from shardwise.spec.strict import DTYPE_BYTES


def facts_of(model: ModelSpec, kinds: Sequence[UnitKind], plan: Plan, device_type: str) -> Facts:
    """Return a plan's units in bytes, in the order of forward.

    Args:
        model: The model's shape.
        kinds: Its units under the plan, the root last.
        plan: What is decided; units are blocks, and embedding and head where they are their own.
        device_type: `cuda` or `cpu`.

    Raises:
        BadInput: other modules are units.
    """
    *inner, root = kinds
    away = plan.offload.parameters and device_type == "cuda"
    _refuse_others(inner, model, plan)
    first: list[PlacedUnit] = []
    last: list[PlacedUnit] = []
    by_block: dict[int, PlacedUnit] = {}
    for kind in inner:
        placed = _placed(kind, plan, away)
        if kind.block_kind is None:
            (last if kind.row.name == model.head else first).append(placed)
        for block in kind.blocks:
            by_block[block] = placed
    embedding = f"{model.embedding}.weight"
    of_embedding = _gradient(embedding, kinds, plan)
    of_head = of_embedding if model.tied else _gradient(f"{model.head}.weight", kinds, plan)
    units = (*first, *(by_block[block] for block in sorted(by_block)), *last)
    return Facts(
        plan=plan,
        device_type="cpu" if device_type == "cpu" else "cuda",
        units=units,
        root=UnitBytes.of(root.tensors, plan, away=away),
        early_root_gradients=UnitBytes.of([t for t in root.tensors if not _embeds(t, model)], plan).gradients,
        head_gradient=of_head,
        tied_gradient=of_embedding if model.tied else 0,
        whole_embedding=_whole_gradient(embedding, model, plan) - of_embedding
        if of_embedding and not model.tied
        else 0,
        embedding_gradient=of_embedding,
        late=_late(units, root.tensors, model),
    )


def _refuse_others(inner: Sequence[UnitKind], model: ModelSpec, plan: Plan) -> None:
    ends = {model.embedding, model.head}
    for kind in inner:
        name = kind.row.name
        is_block = kind.block_kind is not None and name.rpartition(".")[0] == model.block_list
        if not is_block and not ends & set(name.split(" + ")):
            reason = f"makes a unit of {name}, and only blocks, embedding and head have a formula"
            value = ", ".join(plan.units.wrap)
            raise BadInput(Problem(field="units.wrap", value=value, reason=reason, fix="use --by trace"))


def _placed(kind: UnitKind, plan: Plan, away: bool) -> PlacedUnit:
    return PlacedUnit(
        bytes=UnitBytes.of(kind.tensors, plan, away=away),
        name=kind.row.name,
        reshards=kind.row.reshard_after_forward,
        has_backward=kind.row.has_backward,
        block_kind=kind.block_kind,
        recomputed=kind.row.checkpointed,
    )


def _embeds(tensor: UnitTensor, model: ModelSpec) -> bool:
    """Whether a parameter of the root gets its gradient at the end of backward: an embedding that is no head too."""
    if tensor.name.startswith(model.embedding + "."):
        return not model.tied
    owner = tensor.name.rpartition(".")[0]
    return any(module.name == owner and module.kind.endswith("Embedding") for module in model.modules)


def _gradient(name: str, kinds: Sequence[UnitKind], plan: Plan) -> int:
    """Return the bytes of the gradient of a weight outside blocks on one rank of a tensor group."""
    outside = (tensor for kind in kinds if kind.block_kind is None for tensor in kind.tensors)
    return UnitBytes.of([tensor for tensor in outside if tensor.name == name], plan).gradients


def _whole_gradient(name: str, model: ModelSpec, plan: Plan) -> int:
    elements = sum(tensor.elements for tensor in model.outside if tensor.name == name)
    return elements * DTYPE_BYTES[plan.dtypes.param]


def _late(units: Sequence[PlacedUnit], root: Sequence[UnitTensor], model: ModelSpec) -> int | None:
    """Return the place of the first unit that backward reaches, when no gradient flows into its input.

    An embedding of its own is given token ids; a block is given hidden states of frozen weights.
    """
    if units and units[0].block_kind is None and units[0].has_backward and units[0].name != model.head:
        return 0
    if any(t.trained and (t.name.startswith(model.embedding + ".") or _embeds(t, model)) for t in root):
        return None
    return next((place for place, unit in enumerate(units) if unit.has_backward), None)
