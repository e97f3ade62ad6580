"""Keys: every accepted name of a setting, and what is said of a name that is not accepted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardwise.spec.problems import BadInput, Problem, did_you_mean
from shardwise.spec.wording import FIELDS, SECTIONS
from shardwise.spec.yaml_text import shown

OTHER_NAMES: dict[str, str] = {
    "model_name_or_path": "model",
    "model.torch_dtype": "model.dtype",
    "model.attn_implementation": "model.attention",
    "attn_implementation": "model.attention",
    "attention": "model.attention",
    "dataset": "data",
    "train_file": "data",
    "validation_file": "data.held_out",
    "packing": "data.packing",
    "output_dir": "output",
    "lora_r": "lora_rank",
    "lora_target_modules": "lora_targets",
    "modules_to_save": "lora_modules_to_save",
    "max_seq_length": "seq_len",
    "max_length": "seq_len",
    "per_device_train_batch_size": "micro_batch",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "lr": "learning_rate",
    "lr_scheduler_type": "schedule",
    "optim": "optimizer",
    "fsdp.sharding_strategy": "fsdp.strategy",
    "transformer_layer_cls_to_wrap": "units.wrap",
    "fsdp_transformer_layer_cls_to_wrap": "units.wrap",
    "backward_prefetch": "prefetch.backward",
    "forward_prefetch": "prefetch.forward",
    "offload_params": "offload.parameters",
    "cpu_offload": "offload.parameters",
    "offload.params": "offload.parameters",
    "accumulation_mode": "accumulation",
    "use_liger_kernel": "loss_head",
    "fp16": "mixed_precision",
    "bf16": "mixed_precision",
    "gradient_checkpointing": "activation_checkpointing",
    "torch_compile": "compile",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "logging_steps": "log.every",
    "eval_steps": "log.evaluate_every",
}
"""Other name of a key, mostly other trainers' -> ours."""

PLAN_KEYS = (
    *("mesh", "units", "prefetch", "reduce_scatter", "offload", "activation_checkpointing", "model.attention"),
    *("micro_batch", "accumulation", "optimizer", "optimizer_implementation", "optimizer_state_dtype"),
    *("loss_head", "loss_chunk", "compile", "mixed_precision"),
)
"""Keys of the Job that set a field of the Plan: they may also stand under `fsdp`."""

_WRAPPING = "remove it: the repeated blocks are found by themselves; units.wrap names other classes"
_BATCHES = "give micro_batch (rows per rank per forward) or global_batch (rows per optimizer step)"

FOREIGN: dict[str, str] = {
    "gradient_accumulation_steps": "set global_batch = micro_batch x accumulation x ranks instead",
    "batch_size": _BATCHES,
    "train_batch_size": _BATCHES,
    "warmup_ratio": "give warmup_steps, in optimizer steps",
    "fsdp_config": "write its options under fsdp",
    "deepspeed": "fsdp: ZERO2 or ZERO3 name the same layouts",
    "fsdp.auto_wrap_policy": _WRAPPING,
    "fsdp.min_num_params": _WRAPPING,
    "fsdp.use_orig_params": "remove it: FSDP2 always keeps the original parameters",
}
"""Keys of other trainers that have no counterpart here -> what to do."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """One setting as the user wrote it."""

    written: str
    """Dotted key, as written."""
    target: str
    """Dotted key of the Job that it sets (or the written key, when there is none)."""
    value: object
    """The value, as written."""
    line: int | None = None
    """Line in the file."""

    @property
    def name(self) -> str:
        """Last part of the written key."""
        return self.written.rpartition(".")[2]

    def problem(self, reason: str, *, allowed: str = "", fix: str = "") -> Problem:
        """Return a problem of this setting."""
        place = shown(self.written)
        return Problem(field=place, value=self.value, reason=reason, allowed=allowed, fix=fix, line=self.line)

    def refusal(self, reason: str, *, allowed: str = "", fix: str = "") -> BadInput:
        """Return the same as an exception to raise."""
        return BadInput(self.problem(reason, allowed=allowed, fix=fix))


def canonical(written: str) -> str:
    """Return the Job's dotted key for a dotted key in any spelling."""
    full = written.removeprefix("train.")
    inside = _renamed(full.removeprefix("fsdp."))
    if full.startswith("fsdp.") and any(inside == key or inside.startswith(f"{key}.") for key in PLAN_KEYS):
        return inside
    return _renamed(full)


def _renamed(dotted: str) -> str:
    head, dot, rest = dotted.partition(".")
    full = OTHER_NAMES.get(head, head) + dot + rest
    return OTHER_NAMES.get(full, full)


def settings(values: Mapping[str, object], lines: Mapping[str, int], prefix: str = "") -> Iterator[Given]:
    """Yield every setting of a configuration, with the sections and `train:` taken apart."""
    for key, value in values.items():
        written = f"{prefix}{key}"
        target = canonical(written)
        if isinstance(value, Mapping) and (target in SECTIONS or written == "train"):
            yield from settings(value, lines, f"{written}.")
        else:
            yield Given(written=written, target=target, value=value, line=lines.get(written))


def unknown(given: Given) -> BadInput:
    """Return the refusal of a key that is neither a setting nor one that is to come."""
    section, _, leaf = given.target.rpartition(".")
    if given.target in FOREIGN:
        return given.refusal("is not a key of this tool", fix=FOREIGN[given.target])
    if given.target == "train":
        return given.refusal("must be a mapping of keys to values")
    inside = [name.rpartition(".")[2] for name in FIELDS if name.startswith(f"{section}.")] if section else []
    if section == "fsdp":
        inside += [key.rpartition(".")[2] for key in PLAN_KEYS]
    everywhere = [*SECTIONS, *FIELDS, *OTHER_NAMES, "train"]
    homes = [name for name in FIELDS if name.endswith(f".{leaf}")]
    if canonical(leaf) in (*FIELDS, *SECTIONS) and section:
        fix = f"write {leaf!r} at the top level"
    elif homes and not inside:
        fix = "write " + " or ".join(repr(name) for name in homes)
    else:
        fix = did_you_mean(leaf, inside) or did_you_mean(given.target, everywhere)
    fix = fix or ("" if inside else "all keys are in docs/configuration.md")
    return given.refusal("unknown key", allowed=", ".join(inside), fix=fix)
