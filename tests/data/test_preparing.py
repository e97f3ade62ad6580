"""From a file to rows on disk, with every row accounted for."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from data import tokenizers_for_tests as make
from data.tokenizers_for_tests import chat, write_jsonl
from shardwise.data.prepared import DataSummary, Row, Rows, prepare
from shardwise.data.tokens import trained_text
from shardwise.spec.job import DataChoice
from shardwise.spec.problems import BadInput

PAIRS = [{"instruction": f"What is {n}?", "output": f"It is {n}.", "source": "made"} for n in range(20)]


def prepared(path, tokenizer=None, *, seq_len=256, seed=0, vocab_size=None, **choice):
    tokenizer = tokenizer or make.byte_level()
    return prepare(DataChoice(path=path, **choice), tokenizer, seq_len=seq_len, seed=seed, vocab_size=vocab_size)


def contents(rows):
    return [(row.input_ids, row.labels) for row in rows]


def test_round_trip_through_a_folder(tmp_path):
    data = prepared(write_jsonl(tmp_path / "faq.jsonl", PAIRS), held_out=0.2)
    folder = tmp_path / "run" / "data"
    data.write(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["held_out.arrow", "summary.json", "train.arrow"]
    train, held_out = Rows.open(folder / "train.arrow"), Rows.open(folder / "held_out.arrow")
    assert (len(train), len(held_out)) == (16, 4)
    assert contents(train) == contents(data.train)
    assert contents(held_out) == contents(data.held_out)
    assert train.trained_tokens == sum(row.trained_tokens for row in train) == data.summary.trained_tokens
    assert train.tokens == sum(len(row.input_ids) for row in train) == data.summary.tokens
    assert train.longest == max(len(row.input_ids) for row in train) == data.summary.longest_row
    assert data.summary.held_out_tokens == held_out.trained_tokens
    assert DataSummary.model_validate_json((folder / "summary.json").read_text()) == data.summary
    prepared(write_jsonl(tmp_path / "faq.jsonl", PAIRS)).write(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["summary.json", "train.arrow"]


def test_summary_in_words(tmp_path):
    data = prepared(write_jsonl(tmp_path / "faq.jsonl", PAIRS), held_out=0.2)
    path = data.summary.path
    assert data.summary.lines() == [
        f"{path}: 20 rows, read as Alpaca because its rows have instruction and output",
        f"train: 16 rows, {data.summary.tokens:,} tokens, of which {data.summary.trained_tokens:,} are learned; "
        f"longest row {data.summary.longest_row} tokens",
        f"held out: 4 rows, {data.summary.held_out_tokens:,} tokens to predict (split off by prompt)",
        "note: keys not used: source (20 rows)",
    ]
    assert "held out: no rows" in prepared(path).summary.lines()


def test_split_is_by_prompt_and_seed(tmp_path):
    rows = [chat(f"Question {n % 7}", f"Answer {n}") for n in range(40)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    tokenizer = make.byte_level()

    def prompts(side):
        return {tokenizer.decode(row.input_ids).split("<|im_start|>assistant")[0] for row in side}

    first, again, other = (prepared(path, held_out=0.3, seed=seed) for seed in (0, 0, 1))
    assert not prompts(first.train) & prompts(first.held_out)
    assert contents(first.held_out) == contents(again.held_out)
    assert prompts(first.held_out) != prompts(other.held_out)


def test_cut_and_dropped_rows_are_counted(tmp_path):
    rows = [chat("hello", "Paris"), chat("hello " * 30, "Paris"), chat("q", "one two " * 20), chat("q", ""), chat("q")]
    data = prepared(write_jsonl(tmp_path / "a.jsonl", rows), seq_len=32)
    summary = data.summary
    assert (summary.rows_read, summary.rows_kept, summary.rows_cut, len(data.train)) == (5, 2, 2, 2)
    assert summary.dropped == {"cut before the answer": 1, "with empty answer": 1, "without an assistant turn": 1}
    assert summary.longest_row == 32
    assert any(line.startswith("cut: 2 rows longer than seq_len 32 lost ") for line in summary.lines())
    dropped = "dropped: 1 cut before the answer at seq_len 32, 1 with empty answer, 1 without an assistant turn"
    assert dropped in summary.lines()


def test_nothing_left_is_refused_with_counts(tmp_path):
    rows = [chat("hello " * 30, "Paris")] * 9 + [chat("q", "")] * 3
    with pytest.raises(BadInput) as caught:
        prepared(write_jsonl(tmp_path / "a.jsonl", rows), seq_len=32)
    counts = "0 of 12 rows have a token to learn: 9 cut before the answer at seq_len 32, 3 with empty answer"
    assert counts in str(caught.value)


def test_second_file_is_held_out(tmp_path):
    path = write_jsonl(tmp_path / "train.jsonl", PAIRS)
    other = write_jsonl(tmp_path / "eval.jsonl", [chat("what is 3?", "It is 3."), chat("Who?", "me"), chat("Who?", "")])
    data = prepared(path, held_out=other)
    assert (len(data.train), len(data.held_out)) == (20, 2)
    assert f"held out: 2 rows, {data.held_out.trained_tokens} tokens to predict ({other})" in data.summary.lines()
    assert f"{other}: 3 rows, read as chat messages because its rows have messages" in data.summary.notes
    assert f"{other}: dropped 1 with empty answer" in data.summary.notes
    assert f"{other}: 1 row of 2 have a prompt that is trained on too" in data.summary.notes


def test_held_out_file_problems(tmp_path):
    path = write_jsonl(tmp_path / "train.jsonl", PAIRS)
    with pytest.raises(BadInput, match="is the file that is trained on"):
        prepared(path, held_out=str(tmp_path / "." / "train.jsonl"))
    with pytest.raises(BadInput, match=r"data\.held_out.*did you mean 'train.jsonl'"):
        prepared(path, held_out=str(tmp_path / "trian.jsonl"))
    empty = write_jsonl(tmp_path / "empty.jsonl", [chat("q", "")])
    with pytest.raises(BadInput, match=r"data\.held_out.*0 of 1 row have a token to learn: 1 with empty answer"):
        prepared(path, held_out=empty)
    with pytest.raises(BadInput, match="1 distinct prompt in 2 rows"):
        prepared(write_jsonl(tmp_path / "same.jsonl", [PAIRS[0]] * 2), held_out=0.5)


def test_notes_on_tokenizer_and_template(tmp_path):
    pairs = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "q ", "completion": "Paris"}])
    notes = prepared(pairs, make.byte_level(None)).summary.notes
    assert notes[0].startswith("the tokenizer has no chat template: rows are plain prompt + completion")
    assert notes[1].startswith("in 1 row the tokenizer joins an edge of an answer")
    chats = write_jsonl(tmp_path / "b.jsonl", [chat("q </s>", "a")])
    notes = prepared(chats, make.byte_level(make.UNENDED)).summary.notes
    assert notes[0].startswith("in 1 row the chat template writes no end-of-turn token after an answer")
    assert notes[1].startswith("1 row spell out a special token")


def test_rows_that_the_template_refuses_are_all_named(tmp_path):
    rows = [chat("q", "a"), chat("system: s", "q", "a"), chat("system: s", "q", "a")]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(BadInput) as caught:
        prepared(path, make.byte_level(make.BRACKETS))
    assert [problem.field for problem in caught.value.problems] == [f"{path}:2", f"{path}:3"]


def test_unstable_template_is_refused_once(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [chat("q", "a")] * 5)
    with pytest.raises(BadInput) as caught:
        prepared(path, make.byte_level(make.PRETHINKING))
    assert len(caught.value.problems) == 1


def test_token_ids_must_fit_the_embedding(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "hello"}])
    size = len(make.byte_level())
    assert prepared(path, vocab_size=size).summary.notes == ()
    with pytest.raises(BadInput, match=f"has {size} tokens and the model's embedding 200 rows; token .* needs row"):
        prepared(path, vocab_size=200)
    with pytest.raises(BadInput, match=f"token '<pad>' needs row {size}"):
        prepared(path, make.with_pad(), vocab_size=size)
    (note,) = prepared(write_jsonl(tmp_path / "b.jsonl", [{"text": "!"}]), vocab_size=size - 1).summary.notes
    assert note.endswith("no row needs the others")


def test_rows_by_index(tmp_path):
    rows = [Row(input_ids=[n, n + 1, 7], labels=[-100, n + 1, 7]) for n in range(2500)]
    path = tmp_path / "rows.arrow"
    Rows.from_rows(rows).write(path)
    opened = Rows.open(path)
    assert len(opened) == 2500
    assert opened[0] == rows[0]
    assert opened[2499] == rows[2499]
    assert list(opened) == rows
    assert list(opened.take([2000, 3])) == [rows[2000], rows[3]]
    assert opened.trained_tokens == 5000
    assert opened.largest_id == 2500
    with pytest.raises(IndexError):
        opened[2500]


def test_first_label_is_not_counted():
    rows = Rows.from_rows([Row(input_ids=[1, 2], labels=[1, 2]), Row(input_ids=[3], labels=[3])])
    assert rows.trained_tokens == 1
    assert [row.trained_tokens for row in rows] == [1, 0]


@pytest.mark.parametrize("ids", [[], [1, 2]])
def test_rows_must_be_whole(ids):
    with pytest.raises(ValueError, match="tokens and 1 labels"):
        Rows.from_rows([Row(input_ids=ids, labels=[1])])


def test_damaged_files_are_refused(tmp_path):
    with pytest.raises(BadInput, match="prepare the data again"):
        Rows.open(tmp_path / "none.arrow")
    whole = tmp_path / "whole.arrow"
    Rows.from_rows([Row(input_ids=[1, 2], labels=[1, 2])]).write(whole)
    for size in (0, 3, 40, whole.stat().st_size - 5):
        part = tmp_path / "part.arrow"
        part.write_bytes(whole.read_bytes()[:size])
        with pytest.raises(BadInput, match="cannot be read as prepared rows"):
            Rows.open(part)
    table = pa.table({"text": ["a"]})
    with pa.ipc.new_file(str(tmp_path / "other.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(BadInput, match="has columns text"):
        Rows.open(tmp_path / "other.arrow")


def test_json_and_jsonl_give_the_same_rows(tmp_path):
    as_list = tmp_path / "a.json"
    as_list.write_text(json.dumps(PAIRS))
    from_lines = prepared(write_jsonl(tmp_path / "a.jsonl", PAIRS)).train
    assert contents(prepared(str(as_list)).train) == contents(from_lines)
    assert trained_text(from_lines[3], make.byte_level()) == ["It is 3.<|im_end|>"]
