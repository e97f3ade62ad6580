"""From a YAML file and `key=value` overrides to a Job, with every problem reported at once; and back to YAML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from shardwise.spec.chosen import Chosen
from shardwise.spec.contradictions import contradictions
from shardwise.spec.contradictions_layout import implied
from shardwise.spec.job import Job
from shardwise.spec.keys import Given, canonical, settings
from shardwise.spec.problems import BadInput, Problem
from shardwise.spec.spellings import resolve
from shardwise.spec.strict import Strict
from shardwise.spec.wording import FIELDS, SECTIONS, field_problem, nullable, unusable
from shardwise.spec.yaml_text import YamlText, dump_yaml, parse_value, parse_yaml, read_yaml, shown

_LONGEST_VALUE = 120
_ONLY_WITH = {"momentum": ("optimizer", "sgd"), "loss_chunk": ("loss_head", "chunked")}
"""Field of the Job -> field and value without which it has no effect, and is refused."""


def read_job(
    path: Path | None, overrides: Sequence[str] = (), *, text: str | None = None, needs_data: bool = True
) -> Job:
    """Read a Job from a file and `key=value` overrides; raise BadInput with every problem found.

    With `text`, that is read in place of the file, and `path` only names it. Without either, the overrides are all
    there is. An override replaces whatever the file says of that key under any of its names; later ones win. An
    override to null (`steps=null`) takes the key out. Planning needs no data (`needs_data`).
    """
    if text is not None:
        content = parse_yaml(text, source=shown(str(path)) if path is not None else "configuration")
    else:
        content = read_yaml(path) if path is not None else YamlText()
    return _job(content, overrides, needs_data=needs_data)


def read_job_dict(values: Mapping[str, object], overrides: Sequence[str] = (), *, needs_data: bool = True) -> Job:
    """Make a Job from a mapping as it would stand in YAML, in any accepted spelling; raise BadInput."""
    return _job(YamlText(dict(values)), overrides, needs_data=needs_data)


def job_to_yaml(job: Job) -> str:
    """Return the canonical YAML of a Job; `read_job` makes an equal Job from it.

    Unset fields are left out, and so are those that have no effect, such as the `lora_` ones when there is no LoRA;
    every default that holds is written.
    """
    return dump_yaml(job_to_dict(job))


def job_to_dict(job: Job) -> dict[str, object]:
    """Return the mapping that `job_to_yaml` writes; `read_job_dict` makes an equal Job from it."""
    values: dict[str, object] = {}
    for name, info in Job.model_fields.items():
        value = getattr(job, name)
        if isinstance(value, Strict):
            fields = type(value).model_fields
            inside = {key: item for key, item in value if item is not None or fields[key].default is not None}
            values |= {name: inside} if inside else {}
        elif (value is not None or info.default is not None) and _has_effect(job, name):
            values[name] = value
    return values


def _has_effect(job: Job, name: str) -> bool:
    needed, value = _ONLY_WITH.get(name, ("", None))
    return getattr(job, needed) == value if needed else job.use_lora or not name.startswith("lora_")


def _job(content: YamlText, overrides: Sequence[str], *, needs_data: bool = True) -> Job:
    problems = list(content.problems)
    layers = [list(settings(content.values, content.lines))]
    for override in overrides:
        try:
            scope, given = _override(override)
        except BadInput as bad:
            problems += bad.problems
            continue
        layers = [[old for old in layer if not _replaced(old, scope)] for layer in layers]
        layers.append(given)
    chosen, refused = _choose(layers, problems)
    chosen |= implied(chosen)
    dropped = {given.name: given for layer in layers for given in layer if given.value is False}
    problems += contradictions(chosen, dropped)
    refused |= {canonical(problem.field) for problem in content.problems}
    job = _validated(chosen, refused, problems, needs_data=needs_data)
    if job is None or problems:
        ordered = sorted(problems, key=lambda problem: problem.line or 0)
        raise BadInput(replace(problem, value=_short(problem.value)) for problem in ordered)
    return job


def _override(override: str) -> tuple[str, list[Given]]:
    """Return the dotted key of the Job that an override replaces, and the settings it brings."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise BadInput(
            Problem(field=shown(override), reason="is not an override", allowed="key=value, model.path=value")
        )
    value = parse_value(text, source=shown(key))
    scope = canonical(key)
    if value is None and (scope in SECTIONS or (scope in FIELDS and not nullable(scope))):
        return scope, []
    if isinstance(value, Mapping) and (scope in SECTIONS or scope == "train"):
        return scope, list(settings(value, {}, f"{key}."))
    return scope, [Given(written=key, target=scope, value=value)]


def _within(target: str, scope: str) -> bool:
    return target == scope or target.startswith(f"{scope}.")


def _replaced(old: Given, scope: str) -> bool:
    """Tell whether an override of `scope` replaces a setting: one of that key, or one written inside that section."""
    return _within(old.target, scope) or _within(old.written.removeprefix("train."), scope)


def _choose(layers: Iterable[Iterable[Given]], problems: list[Problem]) -> tuple[dict[str, Chosen], set[str]]:
    """Resolve every setting; return the value chosen for each dotted key, and the keys that were refused."""
    chosen: dict[str, Chosen] = {}
    refused: set[str] = set()
    for layer in layers:
        here: dict[str, Chosen] = {}
        clashes: set[tuple[str, str]] = set()
        for given in layer:
            try:
                values = resolve(given)
            except BadInput as bad:
                problems += bad.problems
                refused.add(given.target)
                continue
            for key, value in values.items():
                other = here.setdefault(key, Chosen(value, given))
                pair = (other.given.written, given.written)
                if not _same(other.value, value) and pair not in clashes:
                    clashes.add(pair)
                    problems.append(given.problem(f"contradicts {other}", fix="keep one of the two"))
        chosen |= here
    return chosen, refused


def _same(one: object, other: object) -> bool:
    return one is other or (one == other and isinstance(one, bool) == isinstance(other, bool))


def _validated(
    chosen: Mapping[str, Chosen], refused: set[str], problems: list[Problem], *, needs_data: bool
) -> Job | None:
    """Check the chosen values against the Job's schema, adding what is wrong to `problems`."""
    nested: dict[str, object] = {}
    bad: dict[str, Problem] = {}
    for key, choice in chosen.items():
        reason = unusable(choice.value)
        if reason:
            bad[key] = choice.given.problem(reason)
        section, _, name = key.rpartition(".")
        place = nested.setdefault(section, {}) if section else nested
        assert isinstance(place, dict)
        place[name] = choice.value
    job = None
    try:
        job = Job.model_validate(nested)
    except ValidationError as error:
        for detail in error.errors(include_url=False, include_context=False, include_input=False):
            key = _field_of(detail["loc"])
            if not any(_within(key, other) or _within(other, key) for other in refused):
                bad.setdefault(key, _schema_problem(key, chosen.get(key)))
    if needs_data and "data" not in nested and not any(_within(key, "data") for key in refused):
        bad["data"] = _schema_problem("data", None)
    problems += {str(problem): problem for problem in bad.values()}.values()
    return job


def _field_of(place: tuple[int | str, ...]) -> str:
    """Return the dotted key in a place of pydantic's, without the branches of unions and the items of lists."""
    head = str(place[0])
    return f"{head}.{place[1]}" if head in SECTIONS and len(place) > 1 else head


def _schema_problem(key: str, choice: Chosen | None) -> Problem:
    if choice is not None:
        given = choice.given
        return field_problem(key, shown(given.written), given.value, given.line)
    fix = {"model": "write 'model: ' and a folder or a hub id", "data": "write 'data: ' and a .jsonl file"}.get(key, "")
    return Problem(field=key, reason="is missing", fix=fix)


def _short(value: object) -> object:
    """Return a value that prints in one line of moderate length."""
    text = repr(value)
    return value if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
