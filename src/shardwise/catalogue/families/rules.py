"""transformers' tensor-parallel plans, by the names of the layers that they split."""

from __future__ import annotations

from collections.abc import Mapping

HEAD = {"lm_head": "colwise_gather_output"}
"""Every causal LM with a plan splits its head by the vocabulary."""


def rules(embedding: str, blocks: str, inside: Mapping[str, str]) -> dict[str, str]:
    """Return a plan: head, embedding, and what lies in every block of the list `blocks`."""
    return {**HEAD, embedding: "embedding_rowwise", **{f"{blocks}.*.{name}": word for name, word in inside.items()}}


SPLIT_ATTENTION = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.o_proj": "rowwise",
}
HEAD_NORMS = {
    "self_attn.q_norm": "replicated_with_grad_allreduce",
    "self_attn.k_norm": "replicated_with_grad_allreduce",
}
WHOLE_ATTENTION = {
    "self_attn.q_proj": "colwise_gather_output",
    "self_attn.k_proj": "colwise_gather_output",
    "self_attn.v_proj": "colwise_gather_output",
    "self_attn.o_proj": "rowwise_split_input",
}
"""Attention with norms over all heads: it has to see them all."""
GATED_MLP = {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}
EXPERTS = {
    "mlp.experts.gate_up_proj": "packed_colwise",
    "mlp.experts.down_proj": "rowwise",
    "mlp.experts": "moe_tp_experts",
}
SHARED_EXPERTS = {
    "mlp.shared_experts.gate_proj": "colwise",
    "mlp.shared_experts.up_proj": "colwise",
    "mlp.shared_experts.down_proj": "rowwise",
}
