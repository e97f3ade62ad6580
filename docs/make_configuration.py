"""Write docs/configuration.md from the schema: python docs/make_configuration.py"""

from __future__ import annotations

import textwrap
import typing
from pathlib import Path

from pages import write
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shardwise.spec.job import Job
from shardwise.spec.keys import OTHER_NAMES
from shardwise.spec.not_built import KEYS
from shardwise.spec.wording import FIELDS, SECTIONS, accepted_text

TARGET = Path(__file__).with_name("configuration.md")

HEAD = """# Every key of the configuration

Made from the schema by `python docs/make_configuration.py`; a test holds it up to date.

Keys may also stand in a section `train:`, and every key that sets a field of the plan in the section `fsdp:`. On the
command line they are given as `key=value`, those of sections as `checkpoint.every=50`. Unknown keys are refused with
the nearest right name, two settings that contradict each other are refused with both names, and all problems of a file
are reported together.

"""

COLUMNS = """| key | takes | default | is |
|---|---|---|---|
"""

PARAGRAPHS = {
    "model": """A text is `model.path`. Frozen weights keep the checkpoint's dtype unless `dtype` says otherwise;
without LoRA nothing is frozen, and `dtype` is refused.""",
    "data": """A text is `data.path`. Without `held_out` there is no evaluation.""",
    "fsdp": """A strategy (`full_shard`), or a strategy with options, as text or as a list: `auto_wrap` (always on),
`offload`, `backward_prefetch`, `forward_prefetch`, `no_prefetch`. `ZERO3` is FULL_SHARD, `ZERO2` SHARD_GRAD_OP, `HSDP`
HYBRID_SHARD, `DDP` NO_SHARD; the printed plan says which mesh and flags each became. As a mapping it takes the keys
below and every key of the plan (`mesh`, `units`, `prefetch`, `offload`, ...), which mean the same as at the top level.
FULL_SHARD and HYBRID_SHARD free gathered weights after forward, SHARD_GRAD_OP and HYBRID_SHARD_ZERO2 keep them; a
`reshard_after_forward` that says otherwise is refused.""",
    "mixed_precision": """A dtype is that of the computation, with reduction and logits in fp32. In fp16 the loss
is scaled. `storage_dtype` is what trained weights and gradients are stored in.""",
    "mesh": """The product of `replicate`, `shard` and `tensor` is the number of ranks; what is left out follows from
the strategy. FULL_SHARD and SHARD_GRAD_OP have no replicas, NO_SHARD has nothing else; the hybrid strategies need both
sizes above 1, and take a node as one replica when there are several nodes and no size is given. Sizes that do not fit
are refused with those that do.""",
    "units": """Class names, as text with commas or as a list, are `units.wrap`
(`fsdp_transformer_layer_cls_to_wrap` elsewhere). By default every decoder block is a unit, and the rest is the root
unit.""",
    "prefetch": """A number is the depth in both directions; true is 1, false is 0. `fsdp.backward_prefetch` takes
FSDP1's words: `backward_pre` is 1, `no_prefetch` is 0. `backward_post` is refused: FSDP2 gathers the next unit before
it reduces the gradients of this one, or not ahead at all.""",
    "reduce_scatter": """On GPUs reductions always run on a stream of their own. On CPUs they run in the background
where nothing reads the result at once; where something does (replicas, a cast, offload),
`asynchronous: true` is refused.""",
    "offload": """`none`, `optimizer`, `parameters`, `activations`, or a list of them. `parameters` includes the
optimizer, which runs where they are; it is what other trainers call `cpu_offload`. `true` is refused, as it does not
say what.""",
    "checkpoint": """A number is `checkpoint.every`. A run always ends with a checkpoint.""",
    "log": """How often a run writes to its `metrics.jsonl`, and to TensorBoard.""",
}
"""What may stand in place of a section's mapping, and what its values mean together."""

MAPPINGS_ONLY = ("mesh", "reduce_scatter", "log")
"""Sections that have no short form."""

MODES = """`accumulation` says what is reduced when a step has several micro-batches. `reduce_each`: everything each
time, which takes the least memory. `defer_all` (`no_sync` elsewhere): nothing before the last, so gradients stay whole
on every rank meanwhile. `defer_replicate`: shards each time, replicas only at the last; it needs a mesh with replicas.
`loss_head` says how much of the logits exists at a time: `eager` all of a micro-batch, `chunked` those of `loss_chunk`
tokens, `fused` (Liger's kernel, on GPUs) none whole. `loss_chunk` without `chunked`, `momentum` without `sgd`, and an
implementation or a state dtype of an optimizer that has its own are refused."""

VALUES = """Values of other trainers are taken too: `optim: adamw_torch`, `adamw_torch_fused` (adamw with
`optimizer_implementation: fused`), `adamw_torch_8bit` (`adamw_8bit`, which is torchao's here); `accumulation: no_sync`;
`use_liger_kernel: true` and `loss_head: liger` (`fused`); `torch.bfloat16`, `float16` and the like. The optimizers of
bitsandbytes, paged ones among them, are refused: they do not know sharded parameters."""


def rows(model: type[BaseModel], prefix: str = "") -> typing.Iterator[str]:
    """Yield a table row per field."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        yield f"| `{key}` | {_takes(key)} | {_default(field)} | {_text(field)} |\n"


def sections() -> typing.Iterator[str]:
    """Yield a heading, a paragraph and a table per section."""
    for name, model in SECTIONS.items():
        yield f"\n## `{name}`\n\n{_filled(PARAGRAPHS[name])}\n{COLUMNS}{''.join(rows(model, f'{name}.'))}"


def _filled(paragraph: str) -> str:
    return textwrap.fill(" ".join(paragraph.split()), 120, break_long_words=False, break_on_hyphens=False) + "\n"


def _text(field: FieldInfo) -> str:
    return " ".join((field.description or "").split()).replace("|", "\\|")


def _takes(key: str) -> str:
    if key in FIELDS:
        return accepted_text(key).replace("|", "\\|")
    return f"[a mapping](#{key})" if key in MAPPINGS_ONLY else f"a value, or [a mapping](#{key})"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if isinstance(field.default, BaseModel) or field.default is None or field.default == ():
        return ""
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def page() -> str:
    """Return the whole page."""
    other: dict[str, list[str]] = {}
    for spelling, key in OTHER_NAMES.items():
        other.setdefault(str(key), []).append(spelling)
    names = "".join(
        f"| `{key}` | {', '.join(f'`{s}`' for s in sorted(found))} |\n" for key, found in sorted(other.items())
    )
    later = "".join(f"- `{key}`\n" for key in KEYS)
    return (
        HEAD
        + COLUMNS
        + "".join(rows(Job))
        + f"\n{_filled(MODES)}"
        + "".join(sections())
        + "\n## Other names\n\nWhat users of other trainers type is taken where it can mean only one thing.\n\n"
        + "| key | also |\n|---|---|\n"
        + names
        + f"\n{_filled(VALUES)}"
        + "\n## Not built yet\n\nThese keys are refused by name, with what to do instead, unless they say that "
        + "nothing is wanted (`quantization: none`):\n\n"
        + later
    )


PAGES = {TARGET: page}
"""Page -> what makes its whole text."""


if __name__ == "__main__":
    write(PAGES)
