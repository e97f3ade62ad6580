"""Blocks are found by structure, in any architecture."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.engine.blocks import find_blocks
from shardwise.spec.problems import BadInput

SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 101}

MODELS = {
    "llama": ("model.layers", {}),
    "gpt2": ("transformer.h", {"n_layer": 3, "n_embd": 64, "n_head": 2}),
    "gpt_neox": ("gpt_neox.layers", {}),
    "opt": ("model.decoder.layers", {"ffn_dim": 64, "word_embed_proj_dim": 64}),
    "bloom": ("transformer.h", {"n_layer": 3, "n_head": 2}),
    "mixtral": ("model.layers", {"num_local_experts": 4, "num_key_value_heads": 2, "intermediate_size": 96}),
}


@pytest.mark.parametrize("family", MODELS)
def test_decoder_blocks_of(family):
    name, fields = MODELS[family]
    config = AutoConfig.for_model(family, **{**SIZES, **fields})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    blocks = find_blocks(model)
    assert blocks.name == name
    assert len(blocks.modules) == 3


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 8)
        self.drops = nn.ModuleList(nn.Dropout() for _ in range(9))
        self.small = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))
        self.stack = nn.ModuleList(Experts() for _ in range(2))


def test_the_outermost_list_with_most_parameters_wins():
    """Not the experts inside a block, not a list without parameters, not the longer but smaller list."""
    assert find_blocks(Decoder()).name == "stack"


def test_a_model_without_blocks_is_refused():
    with pytest.raises(BadInput, match="no repeated decoder blocks"):
        find_blocks(nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 10)))


def test_a_list_that_covers_little_of_the_model_is_refused():
    model = Decoder()
    model.big = nn.Linear(100, 100)
    with pytest.raises(BadInput, match="no repeated decoder blocks"):
        find_blocks(model)
