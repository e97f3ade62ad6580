"""Each format is recognised by its keys, and a row that does not fit is named."""

from __future__ import annotations

import pytest

from data.tokenizers_for_tests import chat
from shardwise.data.formats import read_examples, recognise, unused_keys
from shardwise.data.read import MOST_PROBLEMS, Record
from shardwise.spec.problems import BadInput


def records(*rows):
    return [Record(place=f"a.jsonl:{line}", value=row) for line, row in enumerate(rows, 1)]


def one(row, name):
    (example,) = read_examples(records(row), name)
    return example


@pytest.mark.parametrize(
    ("row", "name", "why"),
    [
        (chat("q", "a"), "messages", "read as chat messages because its rows have messages"),
        (
            {"instruction": "q", "input": "", "output": "a"},
            "alpaca",
            "read as Alpaca because its rows have instruction and output",
        ),
        (
            {"prompt": "q", "completion": "a", "id": 3},
            "prompt_completion",
            "read as prompt and completion because its rows have prompt and completion",
        ),
        ({"text": "t"}, "text", "read as plain text because its rows have text"),
        (
            {**chat("q", "a"), "prompt": "q", "text": "t"},
            "messages",
            "read as chat messages because its rows have messages",
        ),
    ],
)
def test_recognised(row, name, why):
    assert recognise(records(row)[0]) == (name, why)


def test_the_configuration_decides():
    both = {**chat("q", "a"), "text": "t"}
    assert recognise(records(both)[0], "text") == ("text", "read as plain text because data.format says text")
    assert unused_keys(records(both, {"text": "t"}), "text") == {"messages": 1}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"id": 1, "conversations": []}, "ShareGPT rows are not built yet (keys found: id, conversations)"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "preference pairs are not built yet"),
        ({"question": "q", "answer": "a"}, "no format has these keys: question, answer; allowed: messages (messages)"),
        ({"mesages": []}, "did you mean 'messages'?"),
        ({}, "no format has these keys: none"),
    ],
)
def test_other_formats_are_refused_with_their_keys(row, says):
    with pytest.raises(BadInput) as caught:
        recognise(records(row)[0])
    assert says in str(caught.value)
    assert str(caught.value).startswith("a.jsonl:1: ")


def test_neutral_forms():
    turns = one(chat("system: be brief", "q", "a", "r", "  "), "messages").turns
    assert [(turn.role, turn.content, turn.trained) for turn in turns] == [
        ("system", "be brief", False),
        ("user", "q", False),
        ("assistant", "a", True),
        ("user", "r", False),
        ("assistant", "  ", False),
    ]
    asked = [one({"instruction": "q", "output": "a", **extra}, "alpaca").turns[0].content for extra in EXTRAS]
    assert asked == ["q", "q", "q", "q\n\nmore"]
    assert [turn.content for turn in one({"prompt": "q", "completion": "a"}, "prompt_completion").turns] == ["q", "a"]
    plain = one({"text": "t"}, "text")
    assert (plain.text, plain.turns) == ("t", ())


EXTRAS = [{}, {"input": ""}, {"input": None}, {"input": "more"}]


def test_prompts_are_compared_without_case_and_white_space():
    assert one(chat("system: x", "How  Are\nyou ", "a"), "messages").prompt == "how are you"
    assert one({"text": "A b"}, "text").prompt == "a b"
    with_input = one({"instruction": "q", "input": "more", "output": "a"}, "alpaca")
    assert with_input.prompt == "q more"


def message(**fields):
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **fields}]}


@pytest.mark.parametrize(
    ("name", "row", "says"),
    [
        ("messages", {"prompt": "q"}, "has no 'messages', which messages rows need; keys found: prompt"),
        ("messages", {"messages": []}, "messages is an empty list"),
        ("messages", {"messages": "hello"}, "messages is text, not a list"),
        ("messages", {"messages": ["hello"]}, "message 1 is text"),
        ("messages", {"messages": [{"role": "user"}]}, "message 1 has no 'content'"),
        (
            "messages",
            {"messages": [{"from": "human", "value": "q"}]},
            "message 1 has no 'role'; keys found: from, value",
        ),
        ("messages", message(role="asistant"), "message 2 has role 'asistant'; allowed: system, user, assistant, tool"),
        ("messages", message(role="asistant"), "did you mean 'assistant'?"),
        ("messages", message(role=3), "message 2 has role 3"),
        ("messages", message(content=None), "content of message 2 is nothing (null), not text"),
        ("messages", message(content=[{"type": "text"}]), "content of message 2 is a list, not text"),
        ("messages", message(tool_calls=[{}]), "message 2 has 'tool_calls', which is not built yet"),
        ("messages", {**message(), "tools": [{}]}, "has 'tools': tool definitions are not built yet"),
        ("messages", {"messages": [{"role": "assistant", "content": "a"}]}, "the first message is the assistant's"),
        ("alpaca", {"instruction": "q"}, "has no 'output', which alpaca rows need"),
        ("alpaca", {}, "has no 'instruction' and no 'output'"),
        ("alpaca", {"instruction": "q", "output": 42}, "output is a number, not text"),
        ("alpaca", {"instruction": "q", "output": "a", "input": ["x"]}, "input is a list, not text"),
        ("prompt_completion", {"prompt": [{"role": "user"}], "completion": "a"}, "prompt is a list, not text"),
        ("prompt_completion", {"prompt": "q", "completion": True}, "completion is true or false, not text"),
        ("text", {"text": "a\ud800"}, "text holds half a surrogate pair at character 1"),
    ],
)
def test_rows_that_do_not_fit(name, row, says):
    with pytest.raises(BadInput) as caught:
        one(row, name)
    assert says in str(caught.value)
    assert str(caught.value).startswith("a.jsonl:1: ")


def test_null_keys_of_a_message_say_nothing():
    assert len(one(message(name=None, tool_calls=None), "messages").turns) == 2


def test_many_misfits_at_once():
    with pytest.raises(BadInput) as caught:
        read_examples(records({"text": "a"}, *[{"text": 1}] * 30), "text")
    assert [problem.field for problem in caught.value.problems] == [f"a.jsonl:{2 + n}" for n in range(MOST_PROBLEMS)]
