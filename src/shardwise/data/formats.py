"""Recognise how rows are written, and bring each to one neutral form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from shardwise.data.read import ProblemList, Record, kind_of
from shardwise.spec.problems import BadInput, Problem, did_you_mean

FormatName = Literal["messages", "alpaca", "prompt_completion", "text"]
"""Names of the formats that are built."""

_NEEDED: dict[FormatName, tuple[str, ...]] = {
    "messages": ("messages",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
_OPTIONAL: dict[FormatName, tuple[str, ...]] = {
    "messages": (),
    "alpaca": ("input",),
    "prompt_completion": (),
    "text": (),
}
_TITLES: dict[FormatName, str] = {
    "messages": "chat messages",
    "alpaca": "Alpaca",
    "prompt_completion": "prompt and completion",
    "text": "plain text",
}
_OTHERS = (
    (("conversations",), "ShareGPT rows"),
    (("conversation",), "ShareGPT rows"),
    (("chosen", "rejected"), "preference pairs"),
)
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of a conversation."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str
    """What was said."""
    trained: bool
    """The model learns to say it: true for every assistant turn that is not empty."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One row in neutral form: either turns or plain text."""

    place: str
    """Where it was read (`faq.jsonl:12`)."""
    turns: tuple[Turn, ...] = ()
    """The conversation; empty for plain text."""
    text: str | None = None
    """Plain text, all of it trained; None for a conversation."""

    @property
    def prompt(self) -> str:
        """What rows are told apart by when some are held out: the first user turn, or the whole text.

        White space and case do not count.
        """
        asked = self.text
        if asked is None:
            asked = next((turn.content for turn in self.turns if turn.role == "user"), "")
        return " ".join(asked.split()).casefold()


def recognise(record: Record, chosen: FormatName | None = None) -> tuple[FormatName, str]:
    """Return the format of a file whose first row is `record`, and the reason in words.

    `chosen` (from `data.format`) wins. Raises BadInput, naming the keys found, when no built format fits.
    """
    if chosen is not None:
        return chosen, f"read as {_TITLES[chosen]} because data.format says {chosen}"
    for name, needed in _NEEDED.items():
        if all(key in record.value for key in needed):
            return name, f"read as {_TITLES[name]} because its rows have {' and '.join(needed)}"
    found = ", ".join(record.value) or "none"
    title = next((title for keys, title in _OTHERS if all(key in record.value for key in keys)), None)
    reason = f"{title} are not built yet (keys found: {found})" if title else f"no format has these keys: {found}"
    known = [key for needed in _NEEDED.values() for key in needed]
    fix = next((meant for key in record.value if (meant := did_you_mean(key, known))), "") if title is None else ""
    allowed = "; ".join(f"{name} ({', '.join(needed)})" for name, needed in _NEEDED.items())
    raise BadInput(Problem(field=record.place, reason=reason, allowed=allowed, fix=fix))


def read_examples(records: Iterable[Record], name: FormatName) -> list[Example]:
    """Return every record in neutral form. Raises BadInput with the places of rows that do not fit the format."""
    examples, problems = [], ProblemList()
    for record in records:
        try:
            examples.append(_example(record, name))
        except BadInput as error:
            for problem in error.problems:
                problems.add(problem)
    problems.raise_if_any()
    return examples


def unused_keys(records: Iterable[Record], name: FormatName) -> dict[str, int]:
    """Return the keys that the format does not read -> in how many rows they stand."""
    used = {*_NEEDED[name], *_OPTIONAL[name]}
    return dict(Counter(key for record in records for key in record.value if key not in used))


def _example(record: Record, name: FormatName) -> Example:
    missing = [key for key in _NEEDED[name] if key not in record.value]
    if missing:
        reason = f"has no {' and no '.join(map(repr, missing))}, which {name} rows need"
        raise _misfit(record, reason, f"keys found: {', '.join(record.value) or 'none'}")
    if name == "text":
        return Example(place=record.place, text=_text(record, "text"))
    if name == "messages":
        return Example(place=record.place, turns=_turns(record))
    if name == "prompt_completion":
        asked, answer = _text(record, "prompt"), _text(record, "completion")
    else:
        instruction, answer = _text(record, "instruction"), _text(record, "output")
        extra = _text(record, "input") if record.value.get("input") is not None else ""
        asked = f"{instruction}\n\n{extra}" if extra.strip() else instruction
    return Example(place=record.place, turns=(_turn("user", asked), _turn("assistant", answer)))


def _turn(role: str, content: str) -> Turn:
    return Turn(role=role, content=content, trained=role == "assistant" and bool(content.strip()))


def _turns(record: Record) -> tuple[Turn, ...]:
    """Read `messages`: a list of {role, content}, with someone else speaking before the assistant."""
    messages = record.value["messages"]
    if not isinstance(messages, list) or not messages:
        given = "an empty list" if messages == [] else kind_of(messages)
        raise _misfit(record, f"messages is {given}, not a list of {{role, content}}")
    for key in ("tools", "functions"):
        if record.value.get(key):
            raise _misfit(record, f"has {key!r}: tool definitions are not built yet")
    turns = tuple(_message(record, number, message) for number, message in enumerate(messages, 1))
    if turns[0].role == "assistant":
        raise _misfit(record, "the first message is the assistant's, so nothing asks for it")
    return turns


def _message(record: Record, number: int, message: object) -> Turn:
    where = f"message {number}"
    if not isinstance(message, dict):
        raise _misfit(record, f"{where} is {kind_of(message)}, not {{role, content}}")
    missing = [key for key in ("role", "content") if key not in message]
    extra = [key for key, value in message.items() if key not in {"role", "content"} and value is not None]
    if missing or extra:
        reason = f"{where} has no {missing[0]!r}" if missing else f"{where} has {extra[0]!r}, which is not built yet"
        raise _misfit(record, reason, f"keys found: {', '.join(message) or 'none'}")
    role = message["role"]
    if role not in _ROLES:
        fix = did_you_mean(role, _ROLES) if isinstance(role, str) else ""
        raise _misfit(record, f"{where} has role {role!r}", fix, allowed=", ".join(_ROLES))
    return _turn(role, _checked_text(record, f"content of {where}", message["content"]))


def _text(record: Record, key: str) -> str:
    return _checked_text(record, key, record.value[key])


def _checked_text(record: Record, what: str, value: object) -> str:
    """Return `value` when it is text that can be written as UTF-8."""
    if not isinstance(value, str):
        raise _misfit(record, f"{what} is {kind_of(value)}, not text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _misfit(record, f"{what} holds half a surrogate pair at character {error.start}") from error
    return value


def _misfit(record: Record, reason: str, fix: str = "", allowed: str = "") -> BadInput:
    return BadInput(Problem(field=record.place, reason=reason, fix=fix, allowed=allowed))
