"""The sections of docs/article_figures.md about communication."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from article_tables import Section, rows_words, span, whole_table
from pages import filled

from shardwise.trials.article_grid import CLUSTERS, LORA, METHODS, ROWS, WHOLE, Cell, Gain, fitting, gains, shape, step

LOW, HIGH = 15, 25
"""Percent that the article says prefetching in backward brings."""
SAME = 1.0
"""Percent from which on a change is called faster."""
SMALL = 13.5e9
"""Parameters below which the article would keep weights gathered; those called 13B have 13.0 billion."""

PREFETCH = """
Without it, a block's gather is issued when the block behind it has been computed, and then waits for that block's
reduction, which comes first on the communicator: backward takes computing plus gathers plus reductions. With it, both
run beside the computation, as far as there is any to cover them:

- ratio far below 1, much computing per byte: they are short, and so is what hiding them brings. More rows per card, or
  a faster link, lead there;
- ratio about 1: the most is won;
- ratio far above 1: the link is the bound with and without, and little is won. LoRA reduces next to nothing, so its
  ratio is about half: it gains less where the ratio is low, and more where it is high.

One cell: `shardwise plan --model qwen-7b --cluster 8xA100-SXM-80GB mixed_precision=bf16 activation_checkpointing=true
seq_len=2048 micro_batch=1 global_batch=8 fsdp=FULL_SHARD prefetch.backward=0`, and the same with 1.
"""


def prefetch() -> Section:
    """Return what is said of prefetching."""
    found = gains(("prefetch.backward=0",), ("prefetch.backward=1",))
    middles = {
        cluster: median(percents)
        for cluster in CLUSTERS
        if (percents := fitting(found, lambda cell: (cell.cluster, *cell[2:]) == (cluster, WHOLE, ROWS[0])))  # noqa: B023
    }
    as_said = [cluster for cluster, middle in middles.items() if LOW <= middle <= HIGH]
    more = [cluster for cluster, middle in middles.items() if middle > HIGH]
    many = fitting(found, lambda cell: (cell.method, cell.rows) == (WHOLE, ROWS[-1]))
    lora = fitting(found, lambda cell: cell.method == LORA)
    verdict = (
        f"Holds for all weights and one row of 2048 tokens per card on {', '.join(as_said) or 'none'}; more on"
        f" {', '.join(more) or 'none'}; less on {len(middles) - len(as_said) - len(more)} others. With {ROWS[-1]} rows"
        f" it is {span(many)}, with LoRA {span(lora)}"
    )
    return Section(f"Backward prefetch brings {LOW} to {HIGH} % on fast networks", verdict, _prefetch(found))


def _prefetch(found: Mapping[Cell, Gain]) -> Iterator[str]:
    percents = fitting(found)
    inside = sum(LOW <= percent <= HIGH for percent in percents)
    yield filled(
        "More tokens per second with `prefetch.backward=1` than with 0, in percent: all weights trained / LoRA of rank"
        " 64; checkpointing, bf16, rows of 2048 tokens; (what does not fit). Of the cells that fit,"
        f" {inside} of {len(percents)} lie between {LOW} and {HIGH} %; all together {span(percents)}. Ratio: time of"
        " gathers and reductions per time of computing, all weights."
    )
    for rows in ROWS:
        yield f"\n{rows_words(rows)}:\n"
        yield from whole_table(found, rows, ratio=True)
    yield PREFETCH
    ahead = fitting(gains(("prefetch.forward=0",), ("prefetch.forward=1",)))
    deep = fitting(gains(("prefetch.forward=0",), ("prefetch.forward=2",)))
    yield filled(
        f"Forward prefetch of depth 1 brings {span(ahead)} over the same grid, of depth 2 {span(deep)}: FSDP2's host"
        " runs ahead of the card and gathers the next unit anyway, unless issuing is the bound. So the article is right"
        " that it is little used, for a reason that it does not give."
    )


def strategies() -> Section:
    """Return what is said of SHARD_GRAD_OP."""
    found = gains((), ("fsdp=SHARD_GRAD_OP",))

    def faster(method: str, small: bool, which: str) -> str:
        chosen = fitting(found, lambda cell: cell.method == method and (shape(cell.model).parameters < SMALL) == small)
        return f"{sum(percent >= SAME for percent in chosen)} of {len(chosen)} {which} ({span(chosen)})"

    verdict = (
        f"Holds where it fits, in {len(fitting(found))} of {len(found)} cells. It is faster by {SAME:.0f} % or more in"
        f" {faster(WHOLE, True, 'up to 13B with all weights')} and {faster(LORA, True, 'with LoRA')}, but also in"
        f" {faster(WHOLE, False, 'above 13B with all weights')} and {faster(LORA, False, 'with LoRA')}: memory and the"
        " link decide, not the size"
    )
    return Section("SHARD_GRAD_OP is faster below 13B and with LoRA", verdict, _strategies(found))


def _strategies(found: Mapping[Cell, Gain]) -> Iterator[str]:
    yield filled(
        "It leaves gathers out and adds nothing, so it is never slower. More tokens per second than with FULL_SHARD, in"
        f" percent, all weights / LoRA, {rows_words(ROWS[0])}; (where SHARD_GRAD_OP does not fit):"
    )
    yield ""
    yield from whole_table(found, ROWS[0])
    yield "\nOne cell: the command above with `fsdp=SHARD_GRAD_OP`; memory of both: add `--table`."


def nodes() -> Section:
    """Return what is said of several nodes."""
    names = [cluster for cluster in CLUSTERS if cluster.startswith("2x8xA100")]
    verdict = "Holds, by the network. 16 A100 have so many times the tokens per second of 8, all weights: " + ", ".join(
        f"{_times(cluster, WHOLE, 1):.2f} over {cluster.partition(' ')[2]}" for cluster in names
    )
    return Section("FULL_SHARD over two nodes brings less than twice the tokens per second", verdict, _nodes(names))


def _nodes(names: Sequence[str]) -> Iterator[str]:
    yield "From 8 to 4096 cards, and HYBRID_SHARD and tensor parallel beside: [scaling.md](scaling.md). qwen-7b,"
    yield "FULL_SHARD, all weights / LoRA:"
    yield ""
    yield "| between nodes | " + " | ".join(map(rows_words, ROWS)) + " |"
    yield "|---|" + "--:|" * len(ROWS)
    for cluster in names:
        cells = [" / ".join(f"{_times(cluster, method, rows):.2f}" for method in METHODS) for rows in ROWS]
        yield f"| {cluster.partition(' ')[2]} | " + " | ".join(cells) + " |"


def _times(cluster: str, method: str, rows: int) -> float:
    one = cluster[2:].partition(" ")[0]
    alone, both = (step(Cell(name, "qwen-7b", method, rows)).step_s for name in (one, cluster))
    return 2 * alone / both
