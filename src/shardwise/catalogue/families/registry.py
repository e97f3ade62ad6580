"""Which families are known by formula, and the way from a configuration to a ModelSpec."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from shardwise.catalogue.families import deepseek, falcon, gpt, llama, mixture, phi3
from shardwise.catalogue.families.fields import TRACE, Fields
from shardwise.catalogue.families.tree import Skeleton, spec_of
from shardwise.spec.model_spec import ModelSpec
from shardwise.spec.problems import BadInput, Problem, did_you_mean

FORMULAS: dict[str, Callable[[Fields], Skeleton]] = {
    **{name: partial(llama.build, recipe=recipe) for name, recipe in llama.RECIPES.items()},
    **{name: partial(mixture.build, family=family) for name, family in mixture.MIXTURES.items()},
    **{name: partial(deepseek.build, family=family) for name, family in deepseek.FAMILIES.items()},
    "phi3": phi3.build,
    "gpt2": gpt.gpt2,
    "gpt_bigcode": gpt.gpt_bigcode,
    "gpt_neox": gpt.gpt_neox,
    "opt": gpt.opt,
    "bloom": gpt.bloom,
    "falcon": falcon.falcon,
    "mpt": falcon.mpt,
}
"""transformers' `model_type` -> its formula."""


def spec_by_formula(config: dict[str, Any], *, name: str, note: str = "") -> ModelSpec:
    """Return the shape of the causal LM that transformers builds of a configuration.

    Raises:
        BadInput: no `model_type`, one without a formula, or fields that are missing or wrong.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        reason = "is missing, so the kind of model is not known"
        raise BadInput(Problem(field=f"{name}: model_type", reason=reason, allowed=", ".join(sorted(FORMULAS))))
    if model_type not in FORMULAS:
        near = did_you_mean(model_type, FORMULAS)
        raise BadInput(
            Problem(
                field=f"{name}: model_type",
                value=model_type,
                reason="is not known by formula",
                allowed=", ".join(sorted(FORMULAS)),
                fix=f"{near} {TRACE}" if near else TRACE,
            )
        )
    fields = Fields(config, name)
    skeleton = FORMULAS[model_type](fields)
    fields.check()
    return spec_of(skeleton, config, name, note)
