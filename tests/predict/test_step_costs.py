"""From plans to seconds: every piece of a unit, a root and an update by hand, by a pace and links that add up easily.

The model: 2 blocks of Llama, hidden 16, inner 32, 2 heads, 64 tokens of vocabulary. A block has 4 x 16 x 16 + 3 x 16 x
32 + 2 x 16 = 2592 weights, the root 2 x 64 x 16 + 16 = 2064. A block is 5184 bytes in bf16, 10368 in fp32.

The pace: 1 s per byte moved on the device, 1000 s per operation that is launched, a tenth of a second per byte to the
host, 1 s per element of Adam there. The links: 1, 2 and 3 s per byte of a gather, a reduce-scatter, an all-reduce.
"""

from __future__ import annotations

from typing import Any

import pytest

from predict.estimate_grid import BF16, plan_of
from shardwise.catalogue.clusters import find_cluster
from shardwise.catalogue.models import model_from_config
from shardwise.predict.assemblies import assembly_of
from shardwise.predict.links import Group
from shardwise.predict.pace import Pace
from shardwise.predict.schedule.costs import StepCosts
from shardwise.predict.step_costs import Costing
from shardwise.predict.unit_costs import Speeds
from shardwise.spec.layout import Mesh, Offload, Prefetch, ReduceScatter, Units
from shardwise.spec.method import Lora
from shardwise.spec.runtime import SHARDWISE, Runtime
from shardwise.spec.workload import Workload

CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
}
BLOCK, ROOT = 2592, 2064
PADDING = 6 * (6 * 16 + 32)
"""Two rows of each of the seven A matrices of LoRA become 8 over 8 ranks: 6 more, 16 wide or, for down, 32."""
WORLD, SHARDS = Group(2, 4, 1, 1), Group(1, 4, 1, 1)
HYBRID: dict[str, Any] = {"strategy": "HYBRID_SHARD", "mesh": Mesh(replicate=2, shard=4)}
KEEP: dict[str, Any] = {"strategy": "SHARD_GRAD_OP", "reshard_after_forward": False}
DDP, ZERO2 = Runtime(sharding="none"), {"mesh": Mesh(shard=8), **KEEP}


class RoundPace(Pace):
    """1 s per byte moved, and 1000 per operation; products and attention take nothing."""

    def __init__(self) -> None:
        super().__init__(peak_flops=1.0, slowdown=1.5, issue_s=7.0, unit_issue=100.0)

    def product(self, product: Any) -> float:
        return 0.0

    def attention(self, call: Any) -> float:
        return 0.0

    def move(self, moved: float) -> float:
        return 0.0

    def copy(self, moved: float, operations: int = 1) -> float:
        return moved + 1000 * operations

    def host_copy(self, size: float) -> float:
        return size / 10

    def host_adam(self, elements: float) -> float:
        return elements


class RoundLinks:
    """1, 2 or 3 s per byte by kind; remembers who took part."""

    def __init__(self) -> None:
        self.asked: set[tuple[str, float, Group]] = set()

    def seconds(self, kind: str, payload: float, group: Group) -> float:
        self.asked.add((kind, payload, group))
        return payload * {"all_gather": 1, "reduce_scatter": 2, "all_reduce": 3}[kind]

    def over(self, kind: str, payload: float) -> set[Group]:
        """The groups of the collectives of a kind and size."""
        return {group for asked, size, group in self.asked if (asked, size) == (kind, payload)}


def costs(
    cluster: str = "2x4xA100-SXM-80GB",
    runtime: Runtime = SHARDWISE,
    lora: Lora | None = None,
    **fields: Any,
) -> tuple[StepCosts, RoundLinks]:
    """The pieces of a step, and the collectives that were asked for."""
    machines, links = find_cluster(cluster), RoundLinks()
    work = Workload(model=model_from_config(CONFIG, name="tiny"), seq_len=32, lora=lora)
    plan = plan_of(lora=lora is not None, cluster=machines, **fields)
    assembly = assembly_of(work, machines, runtime)
    speeds = Speeds(cluster=machines, pace=RoundPace(), links=links)  # type: ignore[arg-type]
    return Costing(assembly.computed, speeds).step(assembly.step(plan)), links


def test_a_block_of_hybrid_shard():
    """4 shards, 2 replicas: a rank has 648 weights of a block, 2592 bytes in fp32, 1296 in bf16.

    Into a gather: 2592 read, 1296 written, 1296 copied: 6480 in 2 operations. Out of it: 5184 copied. Into a reduction:
    5184 read and 10368 written. The replicas sum a quarter of that.
    """
    step, links = costs(**HYBRID)
    first, second = step.units
    assert first == second
    assert (first.gather, first.regather) == (5184, 5184)
    assert first.copy_in == 6480 + 2000
    assert first.copy_out == first.recopy_out == 2 * 5184 + 1000
    assert first.reduce_copy_in == 5184 + 10368 + 1000
    assert (first.reduce, first.all_reduce) == (2 * 10368, 3 * 2592)
    assert (first.fetch, first.store, first.recopy_in, first.travel, first.reduce_sum) == (0, 0, 0, 0, 0)
    assert links.over("all_gather", 5184) == {SHARDS}
    assert links.over("reduce_scatter", 10368) == {SHARDS}
    assert links.over("all_reduce", 2592) == {Group(2, 1, 4, 4)}
    assert (step.rules, step.slowdown, step.names) == ("nccl", 1.5, ("model.layers.0", "model.layers.1"))
    assert not step.regather_group


def test_the_root_stays_gathered():
    """2064 weights; its forward ends the model's, so backward gathers nothing; it is reduced like a block."""
    root = costs(**HYBRID)[0].root.unit
    assert (root.gather, root.regather, root.recopy_out) == (2 * ROOT, 0, 0)
    assert (root.reduce, root.all_reduce) == (2 * 4 * ROOT, 3 * ROOT)


def test_weights_that_are_kept_are_gathered_once():
    kept = costs(**KEEP)[0].units[0]
    assert (kept.gather, kept.regather, kept.recopy_out) == (5184, 0, 0)


def test_resharding_to_pairs():
    """A rank keeps half of a block, 2592 bytes of bf16, which it copies in forward. Backward copies that twice, as
    torch's one copy for shards of another dtype does, and gathers it over pairs, on their own communicator."""
    step, links = costs(reshard_after_forward=2)
    block, freed = step.units[0], costs()[0].units[0]
    assert step.regather_group
    assert block.forward == freed.forward + 2 * 2592 + 1000
    assert (block.gather, block.regather) == (5184, 5184)
    assert block.recopy_in == 2 * 2 * 2592 + 2000
    assert links.over("all_gather", 5184) == {WORLD, Group(1, 2, 2, 1)}


def test_what_is_kept_of_weights_stored_as_computed_is_copied_once():
    bf16 = BF16.model_copy(update={"trained_storage": "bf16", "reduce": "bf16"})
    block = costs(reshard_after_forward=2, dtypes=bf16)[0].units[0]
    assert block.copy_in == 2 * 5184 // 8 + 1000
    assert block.recopy_in == 2 * 2592 + 1000


def test_resharding_over_the_whole_axis_is_the_usual():
    """torch takes the size of the axis for True."""
    step = costs(reshard_after_forward=8)[0]
    assert not step.regather_group
    assert step.units[0] == costs()[0].units[0]


def test_one_shard_copies_and_sums():
    """Nothing is gathered: 10368 bytes are cast to 5184, and those copied. Replicas sum whole gradients."""
    step, links = costs(strategy="NO_SHARD", mesh=Mesh(replicate=8), reshard_after_forward=False)
    block = step.units[0]
    assert (block.gather, block.regather, block.reduce) == (0, 0, 0)
    assert block.copy_in == 10368 + 5184 + 1000
    assert block.copy_out == 2 * 5184 + 1000
    assert block.all_reduce == 3 * 10368
    assert links.over("all_reduce", 10368) == {WORLD}


def test_one_card_has_no_collectives():
    step, links = costs("1xA100-SXM-80GB", strategy="NO_SHARD", mesh=Mesh(), reshard_after_forward=False)
    assert links.asked == set()
    assert step.update.agree == step.update.clip_exchange == 0
    assert step.units[0].trains


def test_whole_weights():
    """DDP: nothing is gathered or copied out; gradients are summed over all ranks."""
    block = costs(runtime=DDP, strategy="NO_SHARD", mesh=Mesh(replicate=8), reshard_after_forward=False)[0].units[0]
    assert (block.copy_in, block.gather, block.copy_out, block.regather, block.recopy_out) == (0, 0, 0, 0, 0)
    assert (block.reduce, block.all_reduce) == (0, 3 * 10368)


def test_zero_2_gathers_what_it_has_updated():
    step = costs(runtime=DDP, **ZERO2)[0]
    assert step.rules == "ddp"
    assert (step.units[0].gather, step.units[0].reduce, step.units[0].all_reduce) == (0, 2 * 10368, 0)
    assert step.update.gather == 2 * (2 * BLOCK + ROOT)


def test_the_first_fsdp_flattens_gradients_beside_backward():
    """No copies out and into reductions; 5184 bytes of gradients are put together, then cast to 10368, in backward."""
    block, other = costs(runtime=Runtime(sharding="fsdp1"))[0].units[0], costs()[0].units[0]
    assert (block.copy_out, block.recopy_out, block.reduce_copy_in) == (0, 0, 0)
    assert block.backward == other.backward + (2 * 5184 + 1000) + (5184 + 10368 + 1000)
    assert (block.gather, block.regather, block.reduce) == (5184, 5184, 2 * 10368)


def test_shards_on_the_host_travel():
    """A rank of 8 has 324 weights of a block: 1296 bytes each way. Adam and the norm are the host's: (2 x 324 + 258)
    elements, and half of that."""
    step = costs(offload=Offload(parameters=True))[0]
    block, update = step.units[0], step.update
    assert (block.fetch, block.store) == (129.6, 129.6)
    assert (update.update, update.host_update, update.clip) == (0, 906, 453)
    assert update.fetch == update.store == 0


def test_states_on_the_host_travel_for_the_update():
    """Two states of 906 elements in fp32."""
    update = costs(offload=Offload(optimizer=True))[0].update
    assert update.fetch == update.store == pytest.approx(906 * 8 / 10)
    assert update.host_update == 0
    assert update.update > 0


def test_saved_activations_travel():
    """As many bytes as memory counts, one way; ends of their own save on the device."""
    offload = Offload(activations=True)
    step = costs(offload=offload, units=Units(embedding="own", head="own"))[0]
    machines = find_cluster("2x4xA100-SXM-80GB")
    work = Workload(model=model_from_config(CONFIG, name="tiny"), seq_len=32)
    parts = assembly_of(work, machines, SHARDWISE).step(plan_of(cluster=machines, offload=offload)).parts
    travelling = [block.travelling / 10 for block in parts.blocks]
    assert min(travelling) > 0
    assert [unit.travel for unit in step.units] == [0, *travelling, 0]


def test_what_waits_is_added_up_in_backward():
    """Deferred: 5184 bytes cast to and added to 10368, and reductions take what waited, in fp32."""
    waiting = costs(accumulation_steps=2, accumulation_mode="defer_all")[0].units[0]
    each = costs(accumulation_steps=2)[0].units[0]
    assert waiting.backward == each.backward + 5184 + 3 * 10368 + 1000
    assert waiting.reduce_copy_in == 2 * 10368 + 1000
    assert each.reduce_copy_in == 5184 + 10368 + 1000


def test_processes_on_cpus_add_up_what_arrives():
    """2 ranks: each adds one half of 10368 bytes, twice read and once written. From the second micro-batch on, shards
    of gradients, half of all in fp32, are added to those before."""
    fp32 = BF16.model_copy(update={"param": "fp32"})
    step = costs("2xcpu", dtypes=fp32, accumulation_steps=2)[0]
    assert step.rules == "gloo"
    assert step.units[0].reduce_sum == 3 * 10368 / 2 + 1000
    assert step.adding == 3 * 4 * (2 * BLOCK + ROOT) / 2 + 1000
    assert costs("2xcpu", dtypes=fp32)[0].adding == 0
    assert costs("2xcpu", dtypes=fp32, offload=Offload(parameters=True))[0].units[0].fetch == 0


def test_a_tensor_axis_is_on_the_critical_path():
    """2 rows x 32 tokens x 16 x 2 bytes are summed behind attention and MLP; backward sums their inputs' gradients."""
    step, links = costs(mesh=Mesh(shard=4, tensor=2), micro_batch=2)
    size = 2 * 32 * 16 * 2
    assert (step.units[0].forward, step.units[0].backward) == (2 * 3 * size, 2 * 3 * size)
    assert links.over("all_reduce", size) == {Group(1, 2, 2, 1)}


def test_exchanges_over_a_tensor_axis_are_told():
    """Four sums of 2048 bytes a block in each micro-batch, 3 s a byte, and those of embedding and head. Products and
    pointwise operations take nothing here, so they are all that is computed."""
    step = costs(mesh=Mesh(shard=4, tensor=2), micro_batch=2)[0]
    blocks = sum(unit.forward + unit.backward for unit in step.units)
    root = step.root
    ends = root.embed + root.head + root.head_backward + root.embed_backward
    assert blocks == 2 * 4 * 3 * 2048
    assert step.tensor == blocks + ends > blocks
    assert costs()[0].tensor == 0


def test_agreements_of_a_step():
    """Count and loss over all ranks (16 and 8 bytes), the norm over the shards (4); fp16 agrees on overflow twice."""
    step, links = costs(**HYBRID)
    assert step.update.agree == 3 * 16
    assert step.update.clip_exchange == 3 * (4 + 8)
    assert links.over("all_reduce", 16) == {WORLD}
    fp16 = BF16.model_copy(update={"param": "fp16", "loss_scaling": True})
    assert costs(**HYBRID, dtypes=fp16)[0].update.clip_exchange == 3 * (4 + 8 + 2 * 4)


def test_the_host_issues_operations_and_hooks():
    """7 s per operation, 100 per unit and pass."""
    step = costs()[0]
    machines = find_cluster("2x4xA100-SXM-80GB")
    work = Workload(model=model_from_config(CONFIG, name="tiny"), seq_len=32)
    block = assembly_of(work, machines, SHARDWISE).step(plan_of(cluster=machines)).parts.blocks[0].work
    assert step.units[0].forward_issue == 100 + 7 * block.forward.operations
    assert step.units[0].backward_issue == 100 + 7 * block.backward.operations


def test_ends_of_their_own():
    """Embedding and head are the first and the last unit, and compute there. The embedding's reduction comes last; the
    head stays gathered; the root has one norm left, 16 weights."""
    step = costs(units=Units(embedding="own", head="own"))[0]
    assert step.names == ("model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head")
    assert step.late == 0
    assert [unit.regather for unit in step.units] == [2048, 5184, 5184, 0]
    assert step.root.unit.gather == 2 * 16
    assert (step.root.embed_issue, step.root.head_issue) == (0, 0)
    assert step.units[0].forward_issue > 100
    assert step.units[3].forward_issue > 100


def test_a_tied_unit_computes_in_the_root():
    """Embedding and head are one unit, in front; what they compute stands where the root computes."""
    tied = {**CONFIG, "tie_word_embeddings": True}
    machines, links = find_cluster("2x4xA100-SXM-80GB"), RoundLinks()
    assembly = assembly_of(Workload(model=model_from_config(tied, name="tied"), seq_len=32), machines, SHARDWISE)
    plan = plan_of(cluster=machines, units=Units(embedding="own"))
    speeds = Speeds(cluster=machines, pace=RoundPace(), links=links)  # type: ignore[arg-type]
    step = Costing(assembly.computed, speeds).step(assembly.step(plan))
    assert step.names[0] == "model.embed_tokens + lm_head"
    assert (step.units[0].gather, step.units[0].regather, step.late) == (2 * 64 * 16, 0, 0)
    assert step.units[0].forward_issue == step.units[0].backward_issue == 100
    assert step.root.embed_issue > 0
    assert step.root.head_issue > 0


def test_a_frozen_first_block_is_reached_last():
    """Adapters of rank 2 beside seven layers: 4 x 2 x (16 + 16) + 3 x 2 x (16 + 32) weights. They alone are reduced; no
    gradient flows into block 0, so FSDP2 reduces it at the very end."""
    lora = Lora(rank=2)
    step = costs(lora=lora)[0]
    adapters = 4 * 2 * (16 + 16) + 3 * 2 * (16 + 32)
    assert step.units[0].gather == 2 * (BLOCK + adapters + PADDING)
    assert step.units[0].reduce == 2 * 4 * (adapters + PADDING)
    assert step.late == 0
    assert not step.root.unit.trains


def test_what_is_gathered_ahead():
    """Forward 1, backward 2, by place; the last entry is the root's."""
    step = costs(prefetch=Prefetch(forward=1, backward=2, async_all_gather=True))[0]
    assert step.ahead == ((1,), (), (0,))
    assert step.behind == ((), (0,), (1, 0))


def test_switches_are_handed_on():
    reduce = ReduceScatter(buffers=3, separate_group=True, asynchronous=True)
    step = costs(reduce_scatter=reduce, accumulation_steps=4, accumulation_mode="defer_replicate", **HYBRID)[0]
    assert (step.buffers, step.separate_group, step.micro_batches, step.mode) == (3, True, 4, "defer_replicate")
    assert step.background_gathers
    assert step.background_reductions


def test_plans_that_share_a_unit_share_its_seconds():
    """The same Costing, another prefetch: what was worked out is not worked out again."""
    machines, links = find_cluster("8xA100-SXM-80GB"), RoundLinks()
    work = Workload(model=model_from_config(CONFIG, name="tiny"), seq_len=32)
    assembly = assembly_of(work, machines, SHARDWISE)
    speeds = Speeds(cluster=machines, pace=RoundPace(), links=links)  # type: ignore[arg-type]
    costing = Costing(assembly.computed, speeds)
    plan = plan_of(cluster=machines)
    one = costing.step(assembly.step(plan))
    deeper = plan.model_copy(update={"prefetch": Prefetch(forward=1, backward=1, async_all_gather=True)})
    other = costing.step(assembly.step(deeper))
    assert one.units[0] is other.units[0]
    reduced = plan.model_copy(update={"dtypes": plan.dtypes.model_copy(update={"reduce": "bf16"})})
    assert costing.step(assembly.step(reduced)).units[0].reduce == one.units[0].reduce / 2
