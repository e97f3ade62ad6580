"""The reported changes: five threads, with what each says of its run and what is taken for the rest."""

from __future__ import annotations

from functools import partial

from shardwise.catalogue.dimensions import model_from_dimensions
from shardwise.catalogue.models import find_model
from shardwise.spec.runtime import Runtime
from shardwise.trials.directions import Direction, Guess

PURE_BF16 = "mixed_precision={param_dtype: bf16, reduce_dtype: bf16, storage_dtype: bf16}"
REDUCED_IN_BF16 = "mixed_precision={param_dtype: bf16, reduce_dtype: bf16}"
REDUCED_IN_FP32 = "mixed_precision={param_dtype: bf16, reduce_dtype: fp32}"

FULL_TO_HYBRID = Direction(
    name="FULL_SHARD to HYBRID_SHARD on 4 nodes",
    source="oumi-ai/oumi#213",
    said="55.349 to 74.41 samples/s on 4 nodes of GCP; one node has 21.7",
    low=1.34,
    high=1.34,
    model=partial(
        model_from_dimensions, layers=24, hidden=2048, heads=32, ffn=8192, vocab=50272, mlp="swiglu", tied=False
    ),
    runtime=Runtime(sharding="fsdp1", reentrant=True, drops_logits=True, attention_kernel="flash"),
    accumulation=16,
    settings=(REDUCED_IN_BF16, "activation_checkpointing=true", "accumulation=defer_all", "prefetch.backward=0"),
    before=("fsdp=FULL_SHARD",),
    after=("fsdp=HYBRID_SHARD", "mesh.replicate=4", "mesh.shard=4"),
    known=(
        "The model is HuggingFaceFW/ablation-model-fineweb-v1 (llama2b.pt.yaml): Llama, 1.82B parameters, rows of"
        " 2048.",
        "A node has 4 A100 of 40 GB (`A100:4` in #236), as 21.7 samples/s at an MFU of 0.373 also says: a2-highgpu-4g.",
        "16 rows per card (#207), and forwards until a card has 256 rows (#205, #225): 16 of them.",
        "accelerate's FSDP is the first FSDP, reduces in bf16, and its accumulation reduces at the last forward alone.",
        "SkyPilot started the machines; before October 2024 it used virtio adapters, with 1/1.8 of the machine's rate"
        " (skypilot-org/skypilot#4095).",
    ),
    assumed=(
        "The Trainer's checkpointing of that time enters autograd again, so backward gathers nothing ahead.",
        "AdamW; the report does not name the optimizer.",
    ),
    guesses=(
        Guess(words="50 / 1.8 Gb/s between nodes", cluster="4x4xA100-SXM-40GB eth-28", rows=16, seq_len=2048),
        Guess(words="20 Gb/s", cluster="4x4xA100-SXM-40GB eth-20", rows=16, seq_len=2048),
        Guess(words="the machine's 50 Gb/s", cluster="4xa2-highgpu-4g", rows=16, seq_len=2048),
        Guess(words="100 Gb/s", cluster="4x4xA100-SXM-40GB eth-100", rows=16, seq_len=2048),
    ),
    rows_per_s=55.349,
)

RESHARD_OFF = Direction(
    name="weights kept after forward (reshard off)",
    source="meta-pytorch/torchtune#2402",
    said="about 8 % more tokens/s per GPU with Qwen2.5-3B",
    low=1.08,
    high=1.08,
    model=partial(find_model, "qwen2.5-3b"),
    runtime=Runtime(fused_norms=True, attention_kernel="flash"),
    accumulation=8,
    settings=(PURE_BF16, "activation_checkpointing=true", "loss_head=chunked"),
    before=("fsdp=FULL_SHARD",),
    after=("fsdp=SHARD_GRAD_OP",),
    known=(
        "The recipe (qwen2_5/3B_full.yaml): all in bf16, checkpointing, fused AdamW, logits in pieces, 2 rows per card,"
        " 8 forwards per step, each reduced.",
    ),
    assumed=(
        "The recipe as it comes: rows of alpaca, not packed, padded to the longer of two: 256 tokens.",
        "One machine of 8 A100; the report names none.",
    ),
    guesses=(
        Guess(words="8 A100, rows of 256", cluster="8xA100-SXM-80GB", rows=2, seq_len=256),
        Guess(words="8 A100, rows of 1024", cluster="8xA100-SXM-80GB", rows=2, seq_len=1024),
        Guess(words="2 A100, rows of 256", cluster="2xA100-SXM-80GB", rows=2, seq_len=256),
        Guess(words="8 H100, rows of 1024", cluster="8xH100-SXM-80GB", rows=2, seq_len=1024),
        Guess(words="8 RTX 4090, rows of 1024", cluster="8xRTX-4090", rows=2, seq_len=1024),
    ),
)

DEFERRED_ALL_REDUCE = Direction(
    name="all-reduce between nodes once in 4 forwards",
    source="NVIDIA/cosmos-framework#162",
    said="22.2 s with one forward; with four 88.8 s (4 x 22.2), deferred 54.3 s; computing 10.8 s a forward",
    low=1.63,
    high=1.63,
    model=partial(
        model_from_dimensions,
        layers=36,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn=12288,
        vocab=1024,
        mlp="swiglu",
        tied=False,
        qk_norm=True,
    ),
    runtime=Runtime(fused_norms=True, attention_kernel="flash"),
    accumulation=4,
    settings=(PURE_BF16, "activation_checkpointing=true", "fsdp=HYBRID_SHARD", "mesh.replicate=2", "mesh.shard=8"),
    before=("accumulation=reduce_each",),
    after=("accumulation=defer_replicate",),
    known=(
        "2 x 8 A100 of 80 GB over Ethernet, 8 shards x 2 replicas, 64 rows per card, checkpointing: the LIBERO recipe"
        " for cards with less memory (docs/action_policy_libero_sft.md).",
        "Of Cosmos3-Nano's two towers of 8B one trains (36 blocks of Qwen3-8B, 7.0B parameters), in bf16; gradients are"
        " reduced in bf16, as units have no policy of their own.",
    ),
    assumed=(
        "The trained tower alone stands in for the model. Its rows have about 320 tokens (5 latent frames of 12 x 20 /"
        " 4, and 16 actions); what is left out, the frozen tower and the video encoder, computes too, so rows are taken"
        " twice as long, which brings computing near the reported 10.8 s.",
        "Which Ethernet is not said: of the usual rates that one whose step comes nearest to 88.8 s.",
    ),
    guesses=tuple(
        Guess(words=f"{rate} Gb/s Ethernet", cluster=f"2x8xA100-SXM-80GB eth-{rate}", rows=64, seq_len=640)
        for rate in (1, 10, 25, 40, 100)
    ),
    others=(
        Guess(words="10 Gb/s, rows of 320", cluster="2x8xA100-SXM-80GB eth-10", rows=64, seq_len=320),
        Guess(words="25 Gb/s, rows of 320", cluster="2x8xA100-SXM-80GB eth-25", rows=64, seq_len=320),
    ),
    rows_per_s=64 * 16 * 4 / 88.8,
    picked_by_speed=True,
)

REDUCTION_IN_BF16 = Direction(
    name="gradients reduced in bf16 instead of fp32",
    source="mlfoundations/scaling#3",
    said="3000 to 3200 tokens/s per GPU, a 7B model on 2 nodes of A100, early code",
    low=3200 / 3000,
    high=3200 / 3000,
    model=partial(
        model_from_dimensions, layers=32, hidden=4096, heads=32, ffn=11008, vocab=50432, mlp="swiglu", tied=False
    ),
    runtime=Runtime(sharding="fsdp1", fused_norms=True, attention_kernel="flash"),
    accumulation=1,
    settings=("fsdp=FULL_SHARD", "activation_checkpointing=true"),
    before=(REDUCED_IN_FP32,),
    after=(REDUCED_IN_BF16,),
    known=(
        "open_lm_7b.json: 32 blocks of 4096, rows of 2048, vocabulary of 50432.",
        "main.py: the first FSDP, a unit per block; `--fsdp-amp` and `--fsdp-pure-bf16` differ in the reduction alone.",
        "scripts/train_example.sh: checkpointing, machines of AWS with 8 A100 of 40 GB and EFA.",
    ),
    assumed=(
        "Rows per card are not said: of the usual numbers that one whose speed comes nearest to 3000 tokens/s. The code"
        " was early and may have been slower than what is predicted; then there were more rows, and the effect is"
        " missed.",
    ),
    guesses=tuple(
        Guess(words=f"{rows} row{'s' if rows > 1 else ''} per card", cluster="2xp4d.24xlarge", rows=rows, seq_len=2048)
        for rows in (1, 2, 4, 8, 16)
    ),
    others=(
        Guess(words="10 rows, as their script for 1B", cluster="2xp4d.24xlarge", rows=10, seq_len=2048),
        Guess(words="10 rows, 100 Gb/s Ethernet", cluster="2x8xA100-SXM-40GB eth-100", rows=10, seq_len=2048),
    ),
    rows_per_s=3000 * 16 / 2048,
    picked_by_speed=True,
)

OFFLOAD = Direction(
    name="parameters and Adam back from the host to the card",
    source="pytorch/pytorch#74588",
    said="3 to 10 times slower with `CPUOffload` and `torch.optim.Adam`, by the CPUs that are there (AWS g4dn, p3)",
    low=3.0,
    high=10.0,
    model=partial(find_model, "gpt2-medium"),
    runtime=Runtime(sharding="fsdp1", attention_kernel="flash"),
    accumulation=1,
    settings=("fsdp=FULL_SHARD", "mixed_precision=fp32", "optimizer_implementation=for_loop"),
    before=("offload=parameters",),
    after=("offload=none",),
    known=(
        "torch 1.11: the first FSDP, before it had mixed precision, so fp32; Adam on the host runs one operation after"
        " the other, and the profile shows that it is what takes the time.",
    ),
    assumed=(
        'A "simple distributed model": GPT-2 of 355M parameters, one row of 512 tokens per card.',
        "Of the machines that it names one with several cards, p3.8xlarge with 4 V100; the cards of g4dn compute more"
        " slowly, which makes less of the host's time.",
    ),
    guesses=(
        Guess(words="p3.8xlarge, 512 tokens per card", cluster="p3.8xlarge", rows=1, seq_len=512),
        Guess(words="p3.8xlarge, 128 tokens", cluster="p3.8xlarge", rows=1, seq_len=128),
        Guess(words="p3.8xlarge, 2048 tokens", cluster="p3.8xlarge", rows=4, seq_len=512),
        Guess(words="p3.16xlarge, 512 tokens", cluster="p3.16xlarge", rows=1, seq_len=512),
        Guess(words="g4dn.12xlarge, 128 tokens", cluster="g4dn.12xlarge", rows=1, seq_len=128),
        Guess(words="g4dn.12xlarge, 512 tokens", cluster="g4dn.12xlarge", rows=1, seq_len=512),
    ),
)

DIRECTIONS = (FULL_TO_HYBRID, RESHARD_OFF, DEFERRED_ALL_REDUCE, REDUCTION_IN_BF16, OFFLOAD)
"""All of them."""
