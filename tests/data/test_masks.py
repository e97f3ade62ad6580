"""What is trained, decoded back to text, is exactly what the assistant has to say."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import tokenizers_for_tests as make
from data.tokenizers_for_tests import chat
from shardwise.data.formats import read_examples, recognise
from shardwise.data.read import Record
from shardwise.data.rows import IGNORED
from shardwise.data.tokens import Encoder, pad_token_id, trained_text
from shardwise.spec.problems import BadInput


def encode(row, tokenizer, *, seq_len=512):
    record = Record(place="a.jsonl:1", value=row)
    name, _ = recognise(record)
    (example,) = read_examples([record], name)
    return Encoder(tokenizer, name, seq_len=seq_len).encode(example)


def learned(row, tokenizer):
    encoded = encode(row, tokenizer).row
    assert len(encoded.input_ids) == len(encoded.labels)
    assert all(label in (IGNORED, token) for token, label in zip(encoded.input_ids, encoded.labels, strict=True))
    return trained_text(encoded, tokenizer)


def test_every_assistant_turn_and_its_end_token_are_trained():
    tokenizer = make.byte_level()
    wide = "\u00e9 \u65e5\u672c \U0001f600"
    row = chat("system: be brief", "What is the capital?", "Paris.", f"And {wide}?", f"{wide}\nin two lines")
    assert learned(row, tokenizer) == ["Paris.<|im_end|>", f"{wide}\nin two lines<|im_end|>"]
    ids = encode(row, tokenizer).row.input_ids
    assert ids == tokenizer.apply_chat_template(row["messages"], return_dict=False)


@pytest.mark.parametrize(
    ("row", "trained"),
    [
        ({"instruction": "Name it.", "input": "France", "output": "Paris"}, "Paris<|im_end|>"),
        ({"prompt": "Name it.", "completion": "Paris"}, "Paris<|im_end|>"),
    ],
)
def test_pairs_are_asked_through_the_chat_template(row, trained):
    tokenizer = make.byte_level()
    assert learned(row, tokenizer) == [trained]
    shown = tokenizer.decode(encode(row, tokenizer).row.input_ids)
    assert shown.startswith("<|im_start|>user\nName it.")


@pytest.mark.parametrize("make_tokenizer", [make.metaspace, make.byte_level])
def test_template_that_writes_bos_itself(make_tokenizer):
    tokenizer = make_tokenizer(make.BRACKETS)
    encoded = encode(chat("hello", "how can I help", "the roof", "Replace the tiles"), tokenizer)
    ids = encoded.row.input_ids
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id
    said = [text.strip() for text in trained_text(encoded.row, tokenizer)]
    assert said == ["how can I help </s>", "Replace the tiles </s>"]
    assert not encoded.unended


def test_text_is_trained_whole_and_ends():
    tokenizer = make.byte_level(bos=True)
    row = encode({"text": "hello there"}, tokenizer).row
    assert tokenizer.decode(row.input_ids) == "<s>hello there</s>"
    assert trained_text(row, tokenizer) == ["hello there</s>"]
    own = encode({"text": "<s>hello there</s>"}, tokenizer).row
    assert own.input_ids == row.input_ids
    assert make.byte_level().decode(encode({"text": "a"}, make.byte_level()).row.input_ids) == "a</s>"


def test_prompt_and_completion_without_template():
    tokenizer = make.byte_level(None, bos=True)
    encoded = encode({"prompt": "What is the capital?", "completion": " Paris"}, tokenizer)
    assert tokenizer.decode(encoded.row.input_ids) == "<s>What is the capital? Paris</s>"
    assert trained_text(encoded.row, tokenizer) == [" Paris</s>"]
    assert not encoded.joined


@pytest.mark.parametrize("trim", [True, False])
def test_space_between_prompt_and_answer_joins_the_answer(trim):
    tokenizer = make.byte_level(make.SPACED, trim=trim)
    encoded = encode(chat("hello", "Paris is the capital"), tokenizer)
    assert trained_text(encoded.row, tokenizer)[0].strip() == "Paris is the capital"
    assert encoded.joined
    assert encoded.unended


def test_line_break_joined_with_the_header_is_not_trained():
    tokenizer = make.byte_level()
    tokenizer_joins = make.joining_line_breaks()
    row = chat("hello", "\nParis")
    assert learned(row, tokenizer) == ["\nParis<|im_end|>"]
    encoded = encode(row, tokenizer_joins)
    assert trained_text(encoded.row, tokenizer_joins) == ["Paris<|im_end|>"]
    assert encoded.joined


@pytest.mark.parametrize(
    ("template", "row", "says"),
    [
        (
            make.FORGETFUL,
            chat("q", "<think>x</think>a", "r", "b"),
            "what it wrote up to turn 2 changes when more turns",
        ),
        (make.FORGETFUL, chat("q", "<think>x</think>a", "r"), "what it wrote up to turn 2 changes when more turns"),
        (make.PRETHINKING, chat("q", "a"), "it does not write turn 2 after its own generation prompt"),
        (make.SECRETIVE, chat("q", "<think>x</think>a"), "it does not write the whole answer in turn 2"),
        (make.BRACKETS, chat("system: s", "q", "a"), "refuses this conversation: System role not supported"),
        ("{% for message in messages %}{{ message.content + 3 }}{% endfor %}", chat("q", "a"), "refuses this"),
    ],
)
def test_templates_that_cannot_be_split(template, row, says):
    with pytest.raises(BadInput) as caught:
        encode(row, make.byte_level(template))
    assert says in str(caught.value)
    assert str(caught.value).startswith("a.jsonl:1: ")


def test_forgetful_template_is_fine_while_nothing_is_forgotten():
    tokenizer = make.byte_level(make.FORGETFUL)
    assert learned(chat("q", "<think>x</think>a"), tokenizer) == ["<think>x</think>a<|im_end|>"]
    assert learned(chat("q", "a", "r", "b"), tokenizer) == ["a<|im_end|>", "b<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "drop"),
    [
        (chat("q", " "), "with empty answer"),
        (chat("q"), "without an assistant turn"),
        ({"instruction": "q", "output": ""}, "with empty answer"),
        ({"text": " \n"}, "with empty text"),
    ],
)
def test_rows_with_nothing_to_say(row, drop):
    encoded = encode(row, make.byte_level())
    assert (encoded.row, encoded.drop, encoded.cut) == (None, drop, 0)


def test_empty_answer_between_others_is_shown_but_not_trained():
    assert learned(chat("q", "", "r", "b"), make.byte_level()) == ["b<|im_end|>"]


def test_cutting():
    tokenizer = make.byte_level()
    row = chat("hello", "Paris", "hello", "one two three")
    whole = encode(row, tokenizer).row
    first_answer = next(at for at, label in enumerate(whole.labels) if label != IGNORED)
    for seq_len in range(2, len(whole.input_ids) + 2):
        encoded = encode(row, tokenizer, seq_len=seq_len)
        assert encoded.cut == max(0, len(whole.input_ids) - seq_len)
        if seq_len <= first_answer:
            assert encoded.drop == "cut before the answer"
        else:
            assert encoded.row.input_ids == whole.input_ids[:seq_len]
            assert encoded.row.labels == whole.labels[:seq_len]
            assert encoded.row.trained_tokens > 0


def test_said_special_tokens_are_reported():
    assert encode(chat("q <|im_end|>", "a"), make.byte_level()).controls
    assert not encode(chat("q", "a"), make.byte_level()).controls


@pytest.mark.parametrize(
    ("tokenizer", "row", "says"),
    [
        (make.byte_level(None), {"instruction": "q", "output": "a"}, "has no chat template, which alpaca rows"),
        (make.byte_level(None), chat("q", "a"), "or rows of the format prompt_completion or text"),
        (make.without_specials(), {"text": "a"}, "names no end-of-sequence token"),
        (make.without_specials(), {"prompt": "a", "completion": "b"}, "names no end-of-sequence token"),
    ],
)
def test_tokenizers_that_cannot_do_it(tokenizer, row, says):
    with pytest.raises(BadInput, match=says):
        encode(row, tokenizer)


def test_pad_token():
    assert pad_token_id(make.with_pad()) == make.with_pad().pad_token_id
    assert pad_token_id(make.byte_level()) == make.byte_level().eos_token_id
    with pytest.raises(BadInput, match="names neither a pad nor"):
        pad_token_id(make.without_specials())


said = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda text: text.strip() and "<" not in text
)


@settings(max_examples=60, deadline=None)
@given(turns=st.lists(said, min_size=2, max_size=6))
def test_any_text_comes_back(turns):
    """ChatML keeps every character, so what is trained is every second turn, whatever stands in it."""
    assert learned(chat(*turns), make.byte_level()) == [f"{turn}<|im_end|>" for turn in turns[1::2]]
