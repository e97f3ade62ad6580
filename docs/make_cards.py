"""Write docs/cards.md from the catalogue: python docs/make_cards.py"""

from __future__ import annotations

from pathlib import Path

from shardwise.catalogue.clusters import DRIVER_KEEPS_MIB, DRIVER_KEEPS_SHARE, MIB, cards, gpu

TARGET = Path(__file__).with_name("cards.md")

HEAD = f"""# Cards of the catalogue

Made from `src/shardwise/catalogue/gpus.yaml` by `python docs/make_cards.py`; a test holds it up to date.

A cluster is named `<devices>x<card>`, `<machines>x<devices of each>x<card>`, either with a network behind it, or by a
card alone: `8xA10`, `2x8xH100-SXM-80GB`, `2x8xH100-SXM-80GB ib-8x400`, `4090`. CPU processes are `2xcpu`. Case,
separators, vendor words and the generation of an SXM socket do not matter: `NVIDIA A100-SXM4-80GB` is `a100 80gb`.
A name that may mean several cards (`a100`: 40 or 80 GB) is refused with the choices. Where memory alone decides, a form
factor that is not said is SXM. Devices are counted as torch counts them: an MI250X is two, so a machine with four of
them is `8xMI250X`. A network is `<kind>-<adapters>x<Gb/s of each>` or `<kind>-<Gb/s of a machine>`, or `nvl72`.

Usable is the total that CUDA reports to a program (`torch.cuda.mem_get_info`, and torch's out-of-memory message), in
GiB of 2^30 bytes. It is less than the label, and less than what nvidia-smi shows: the driver keeps a part. Drivers
before 2024 kept up to 1 % less. Where only nvidia-smi's total is known, usable is that less {DRIVER_KEEPS_MIB} MiB and
{100 * DRIVER_KEEPS_SHARE:.2f} %, which meets every card newer than the V100 of which both are known within 0.3 %.
Context and communicators come out of the usable memory; the prediction counts them.

| card | also | label | usable GiB | nvidia-smi MiB | link | usable memory from |
|---|---|--:|--:|--:|---|---|
"""


def rows() -> str:
    """Return the table's rows."""
    lines = []
    for name, card in cards().items():
        usable = gpu(name).usable
        also = ", ".join(f"`{other}`" for other in card.other_names)
        shown = "" if card.smi_mib is None else str(card.smi_mib)
        gib = f"{usable.bytes / MIB / 1024:.2f}"
        lines.append(f"| `{name}` | {also} | {card.label_gb} GB | {gib} | {shown} | {card.link} | {usable.source} |\n")
    return "".join(lines)


def page() -> str:
    """Return the whole page."""
    return HEAD + rows()


if __name__ == "__main__":
    TARGET.write_text(page())
