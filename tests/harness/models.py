"""Tiny random checkpoints with a tokenizer, saved as transformers saves them."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, with the assistant's tokens marked for masks."""

_ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,?!:'-\n"
_SENTENCES = [
    "user assistant system what is the name of the first and the second question of the user",
    "the answer is the name of the thing and then the other thing is in the answer",
]
_SPECIAL = ["<unk>", "<pad>", "<s>", "<|im_start|>", "<|im_end|>"]


def tiny_tokenizer(vocab: int = 101) -> PreTrainedTokenizerFast:
    """Return a BPE tokenizer over letters, digits and a little punctuation, with fewer than `vocab` (>= 80) tokens.

    Special tokens: `<unk>`, `<pad>`, `<s>` (bos, never added by itself), `<|im_start|>`, `<|im_end|>` (eos).
    Text of its alphabet decodes to itself; other characters become `<unk>`.
    """
    assert vocab >= 80, "the alphabet and the special tokens need 77 entries"
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    # Byte-level, as transformers rebuilds some families' tokenizers (qwen2) that way whatever the file says.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab, 101) - 1,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in _SPECIAL],
        initial_alphabet=list(_ALPHABET.replace(" ", "\u0120").replace("\n", "\u010a")),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_checkpoint(
    folder: Path,
    family: str = "llama",
    *,
    vocab: int = 101,
    layers: int = 3,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    head_dim: int = 32,
    heads: int = 2,
    kv: int = 1,
    **config: object,
) -> Path:
    """Save a random model of a transformers `model_type` and its tokenizer into `folder`, and return it.

    Hidden size is `heads * head_dim`, the MLP is 96 wide, 128 positions. Norm weights and biases are random too, so
    that a misplaced slice of them shows. Further keywords go into the config.
    """
    tokenizer = tiny_tokenizer(vocab)
    options: dict[str, object] = {
        "vocab_size": vocab,
        "hidden_size": heads * head_dim,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head_dim,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **config,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
