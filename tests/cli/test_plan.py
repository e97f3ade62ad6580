"""`shardwise plan` on the real command line: answers, exit codes, bad input, and a cold start."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from house.source import ROOT
from shardwise.cli.main import app
from shardwise.spec.plan import Plan
from shardwise.spec.problems import BadInput

FITS = ("--model", "llama-3.2-1b", "--cluster", "8xA100-80GB", "fsdp=FULL_SHARD", "mixed_precision=bf16")
TOO_LARGE = ("--model", "llama-3.1-70b", "--cluster", "8xA10", "fsdp=FULL_SHARD")


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)


def refused(*arguments):
    with pytest.raises(BadInput) as caught:
        run(*arguments)
    return caught.value.problems


def answer(*arguments) -> dict:
    return json.loads(run(*arguments, "--json").output)


def test_what_fits_ends_with_zero_and_what_does_not_with_one():
    yes, no = run(*FITS), run(*TOO_LARGE)
    assert (yes.exit_code, no.exit_code) == (0, 1)
    assert "It fits:" in yes.output
    assert "It does not fit: each card would need" in no.output


def test_without_a_limit_the_answer_is_zero():
    result = run("--model", "smollm2-135m", "--cluster", "2xcpu", "fsdp=full_shard", "seq_len=64")
    assert result.exit_code == 0
    assert "Live tensors of one rank peak at" in result.output


def test_print_and_json_say_the_same():
    content, text = answer(*FITS), run(*FITS).output
    device = content["reports"][0]["footprint"]["device"]
    peak = content["reports"][0]["footprint"]["peak"]
    assert f"{device['total']['value'] / 2**30:.2f} of {device['limit'] / 2**30:.2f} GiB" in text
    assert f"{peak['allocated'] / 2**30:.2f} GiB of live tensors" in text
    assert content["plan"]["fingerprint"] in text
    assert peak["allocated"] == sum(size for name, size in peak["live"].items() if name != "offloaded")
    assert content["fits"] is True


def test_the_page_names_every_key_of_the_json():
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", page))
    content = answer(*FITS)
    rows = answer(*FITS, "--table")["rows"]
    report = content["reports"][0]
    parts = (
        content,
        content["model"],
        report,
        report["footprint"],
        *report["footprint"]["peaks"],
        content["advice"][0],
    )
    inside = report["footprint"]
    parts += (inside["device"], inside["device"]["terms"][0], inside["device"]["total"], inside["host"])
    parts += (inside["largest_buffer"], rows[0], rows[0]["by"]["estimate"])
    assert not {key for part in parts for key in part} - named


def test_a_file_that_names_no_data_is_enough(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: qwen2.5-0.5b\nfsdp: [full_shard]\nuse_lora: true\nlora_rank: 8\ncluster: 4xL4\n")
    content = answer(str(path), "seq_len=512")
    assert content["cluster"]["name"] == "4xL4"
    assert content["job"]["seq_len"] == 512
    assert content["job"]["lora_rank"] == 8


def test_options_stand_over_the_file_and_keep_its_other_settings(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: {path: gpt2, dtype: fp16}\nuse_lora: true\nfsdp: full_shard\ncluster: 4xL4\n")
    content = answer(str(path), "--model", "qwen2.5-0.5b", "--cluster", "2xA10")
    assert (content["model"]["name"].lower(), content["cluster"]["name"]) == ("qwen2.5-0.5b", "2xA10")
    assert content["plan"]["dtypes"]["frozen_storage"] == "fp16"


def test_left_to_the_rule_of_thumb_it_says_so():
    text = " ".join(run("--model", "llama-3.1-8b", "--cluster", "8xA100-80GB").output.split())
    assert "rule of thumb" in text
    assert "SHARD_GRAD_OP" in text


def test_rows_are_no_longer_than_the_model_has_positions_for():
    assert answer("--model", "gpt2", "--cluster", "2xA10")["job"]["seq_len"] == 1024
    (problem,) = refused("--model", "gpt2", "--cluster", "2xA10", "seq_len=2000")
    assert (problem.field, problem.fix) == ("seq_len", "use 1024 or less")


def test_the_plan_is_written_once_and_read_back(tmp_path):
    target = tmp_path / "plan.yaml"
    content = json.loads(run(*FITS, "--json", "-o", str(target)).output)
    stored = yaml.safe_load(target.read_text())
    assert stored.pop("fingerprint") == content["plan"]["fingerprint"] == Plan.model_validate(stored).fingerprint()
    before = target.read_text()
    (problem,) = refused(*FITS, "-o", str(target))
    assert problem.reason == "exists"
    assert target.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


def test_every_strategy_in_one_table():
    settings = ("--model", "llama-2-7b", "--cluster", "8xA100-80GB", "mixed_precision=bf16", "--table")
    rows = {row["strategy"]: row for row in answer(*settings)["rows"]}
    assert list(rows) == ["NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD"]
    whole = rows["NO_SHARD"]["by"]["estimate"]
    assert whole["parameters"] == whole["gradients"] == whole["optimizer_states"] / 2 == 4 * 6_738_415_616
    full = rows["FULL_SHARD"]["by"]["estimate"]
    for name in ("parameters", "gradients", "optimizer_states"):
        assert full[name] == pytest.approx(whole[name] / 8, rel=1e-6)
        assert rows["SHARD_GRAD_OP"]["by"]["estimate"][name] == full[name]
        assert rows["HYBRID_SHARD"]["by"]["estimate"][name] == pytest.approx(whole[name] / 4, rel=1e-6)
    assert rows["SHARD_GRAD_OP"]["by"]["estimate"]["gathered"] > 4 * full["gathered"]
    printed = run(*settings).output
    assert "FSDP / ZeRO-3 = FULL_SHARD 8" in printed
    assert f"{full['peak'] / 2**30:.2f}" in printed


@pytest.mark.parametrize(
    ("arguments", "field", "words"),
    [
        (("--model", "lama-3.1-8b", "--cluster", "8xA10"), "model", "did you mean 'Llama-3.1-8B'?"),
        (("--model", "llama-3.1-8b", "--cluster", "8xA11"), "cluster", "A10"),
        (("--model", "llama-3.1-8b", "--cluster", "0xA10"), "cluster", ""),
        (("--model", "gpt2", "--cluster", "2xA10", "mixed_precision=bf15"), "mixed_precision", "did you mean 'bf16'?"),
        (("--model", "gpt2", "--cluster", "2xA10", "seq_len=0"), "seq_len", "of 2 or more"),
        (("--model", "gpt2", "--cluster", "2xA10", "micro_batch=-1"), "micro_batch", "above 0"),
        (("--model", "gpt2", "--cluster", "2xA10", "seq_lem=8"), "seq_lem", "did you mean 'seq_len'?"),
        (("--model", "gpt2", "--cluster", "2xA10", "--by", "estimat"), "--by", "did you mean 'estimate'?"),
        (("--model", "gpt2", "--cluster", "2xA10", "--by", "estimate,"), "--by", "estimate, trace, run"),
        (("--model", "gpt2", "--cluster", "2xA10", "loss_head=fused", "mesh.tensor=2"), "loss_head", "chunked"),
        (("--model", "gpt2", "--cluster", "3xA10", "mesh.tensor=2"), "mesh.tensor", "use 1 or 3"),
        (("--model", "gpt2", "--cluster", "2xA10", "global_batch=3"), "global_batch", "use 2 or 4"),
        (("--model", "gpt2", "--cluster", "2xA10", "--by", "run"), "cluster", "2xcpu"),
        (("--model", "gpt2", "--cluster", "2xcpu", "--by", "run"), "model", "folder"),
        (("--cluster", "2xA10"), "model", "hub id"),
        (("no.yaml", "--cluster", "2xA10"), "no.yaml", ""),
        (("Qwen-7B", "--cluster", "2xA10"), "Qwen-7B", "write --model Qwen-7B"),
        (("--model", "gpt2", "fsdp=full_shard", "stray"), "stray", "key=value"),
    ],
)
def test_bad_input_names_the_field_and_the_remedy(arguments, field, words):
    problems = refused(*arguments)
    assert [problem.field for problem in problems] == [field]
    assert words in f"{problems[0].allowed} {problems[0].fix} {problems[0].reason}"


CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"model_type": "lama"}, "llama"),
        ({"model_type": None}, "model_type"),
    ],
)
def test_a_bad_config_json_is_named_with_its_field(tmp_path, change, words):
    values = {key: value for key, value in (CONFIG | change).items() if value is not None}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    (problem,) = refused("--model", str(path), "--cluster", "2xA10", "seq_len=64")
    assert words in str(problem)


def test_a_good_config_json_is_enough(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert run("--model", str(tmp_path), "--cluster", "2xA10", "seq_len=64", "fsdp=full_shard").exit_code == 0


def test_the_article_s_case_is_an_example():
    example = ROOT / "examples" / "qwen-7b-a10.yaml"
    by_file = answer(str(example))
    assert by_file["fits"] is True
    assert (
        by_file["plan"]["fingerprint"]
        == answer(
            *("--model", "qwen-7b", "--cluster", "8xA10", "fsdp=full_shard", "mixed_precision=fp16"),
            *("use_lora=true", "lora_rank=64", "activation_checkpointing=true"),
        )["plan"]["fingerprint"]
    )


def test_this_machine_is_the_cluster_where_none_is_named():
    content = answer("--model", "smollm2-135m", "seq_len=64", "fsdp=full_shard")
    assert content["cluster"]["host_bytes"] > 0


def test_bad_input_ends_with_two_and_one_text():
    done = _shardwise("plan", "--model", "lama-3.1-8b", "--cluster", "8xA10")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 2
    assert "did you mean 'Llama-3.1-8B'?" in done.stderr


def test_a_fixed_plan_takes_less_than_a_second_from_a_cold_start_and_imports_no_torch():
    """Seconds of the processor: tests share theirs with others."""
    line = ("plan", "--model", "llama-3.1-8b", "--cluster", "8xA10", "fsdp=FULL_SHARD")
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = _shardwise(*line)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
        assert done.returncode == 1, done.stderr
    assert min(seconds) < 1.0, f"{min(seconds):.2f} s"
    program = (
        "import sys; from shardwise.cli.main import app; from typer.testing import CliRunner; "
        f"result = CliRunner().invoke(app, {list(line)!r}); assert result.exit_code == 1, result.output; "
        "heavy = [name for name in ('torch', 'transformers', 'peft', 'numpy') if name in sys.modules]; "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def _shardwise(*arguments):
    started = [sys.executable, "-c", "from shardwise.cli.main import run; run()", *arguments]
    return subprocess.run(started, capture_output=True, text=True, check=False)
