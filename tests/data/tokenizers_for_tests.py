"""Small real tokenizers, trained in a moment, with the chat templates that real models have."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Every turn between its own marks (Qwen 2, SmolLM2); white space after the end-of-turn token."""

BRACKETS = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% elif message.role == 'user' %}[INST] {{ message.content | trim }} [/INST]"
    "{% else %} {{ message.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
"""The template itself writes BOS, and there is no generation prompt (Llama 2)."""

FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Earlier answers lose their reasoning (Qwen 3)."""

PRETHINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
"""The generation prompt opens a reasoning block that it does not write before a given answer."""

SECRETIVE = CHATML.replace("{{ message.content }}", "{{ message.content.split('</think>')[-1] }}")
"""No answer is written with its reasoning (DeepSeek R1)."""

UNENDED = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""No special token anywhere; the space after the colon belongs to the answer."""

SPACED = UNENDED.replace("assistant:{% endif %}", "assistant: {% endif %}")
"""The same with a generation prompt that ends in a space, which joins the answer's first token."""

_WORDS = [
    "What is the capital of France? The capital of France is Paris.",
    "How do I mend a leaking roof? Replace the broken tiles first, then seal the joints.",
    "user: hello assistant: hello, how can I help you today? [INST] [/INST] system",
    "one two three four five six seven eight nine ten",
]


@cache
def byte_level(template: str | None = CHATML, *, bos: bool = False, trim: bool = True) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer; with `bos` it adds `<s>` in front of plain text, `trim` is of its offsets."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=marks,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_WORDS, trainer)
    steps: list[processors.PostProcessor] = [processors.ByteLevel(trim_offsets=trim)]
    if bos:
        steps.append(processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]))
    tokenizer.post_processor = processors.Sequence(steps)
    return _wrapped(tokenizer, template)


@cache
def metaspace(template: str | None = BRACKETS) -> PreTrainedTokenizerFast:
    """Return a tokenizer that, like SentencePiece, puts a space in front of text and adds BOS (Llama 2)."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(_WORDS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _wrapped(tokenizer, template)


@cache
def joining_line_breaks() -> PreTrainedTokenizerFast:
    """Return a ChatML tokenizer with a token for two line breaks (GPT-4's and Llama 3's way of splitting)."""
    backend = json.loads(byte_level().backend_tokenizer.to_str())
    newline = "\u010a"
    backend["model"]["vocab"][newline * 2] = len(backend["model"]["vocab"])
    backend["model"]["merges"].append([newline, newline])
    backend["pre_tokenizer"]["use_regex"] = False
    return _wrapped(Tokenizer.from_str(json.dumps(backend)), CHATML)


def without_specials(template: str | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer that names neither BOS, EOS nor pad."""
    return PreTrainedTokenizerFast(tokenizer_object=byte_level().backend_tokenizer, chat_template=template)


def with_pad(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a pad token added behind all others."""
    backend = Tokenizer.from_str(byte_level().backend_tokenizer.to_str())
    backend.add_special_tokens([AddedToken("<pad>", special=True)])
    tokenizer = _wrapped(backend, template)
    tokenizer.pad_token = "<pad>"
    return tokenizer


def _wrapped(tokenizer: Tokenizer, template: str | None) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=template
    )


def write_jsonl(path: Path, rows: Iterable[object]) -> str:
    """Write one JSON value per line and return the path as text."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def chat(*turns: str) -> dict[str, object]:
    """Return a `messages` row of `turns`, user first; a turn "system: ..." is the system's."""
    messages, speakers = [], 0
    for turn in turns:
        if turn.startswith("system: "):
            messages.append({"role": "system", "content": turn.removeprefix("system: ")})
        else:
            messages.append({"role": ("user", "assistant")[speakers % 2], "content": turn})
            speakers += 1
    return {"messages": messages}
