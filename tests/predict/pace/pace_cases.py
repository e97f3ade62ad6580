"""Clusters with rates by hand, for the tests of pace."""

from __future__ import annotations

from shardwise.spec.cluster import Cluster, Figure, Gpu, Rates, Sourced
from shardwise.spec.curve import Curve
from shardwise.spec.speeds import DeviceSpeeds, HostSpeeds, Measured


def figure(value):
    return Figure(value=value, source="datasheet")


def rates(memory, achieved=None, host=31.5e9, **products):
    return Rates(
        products={name: figure(tera * 1e12) for name, tera in products.items()},
        memory=figure(memory),
        link=figure(300e9),
        host=figure(host),
        peer_to_peer=True,
        achieved=None if achieved is None else figure(achieved),
    )


def gpu(name, link="nvlink", known=None):
    return Gpu(name=name, usable=Sourced(bytes=80 * 2**30, source="label"), link=link, rates=known)


A100 = gpu("A100-SXM-80GB", known=rates(2.039e12, 0.87, fp32=19.5, tf32=156, bf16=312, fp16=312))
H100 = gpu("H100-SXM-80GB", known=rates(3.35e12, 0.80, fp32=67, bf16=989, fp16=989, fp8=1979))
B200 = gpu("B200-SXM", known=rates(8e12, 1745 / 2250, fp32=80, bf16=2250, fp16=2250))
RTX_5090 = gpu("RTX-5090", link="pcie", known=rates(1.792e12, 236 / 209.5, fp32=105, bf16=209.5, fp16=209.5))
A5000 = gpu("A5000", link="pcie", known=rates(768e9, None, fp32=27.8, bf16=111, fp16=111))
V100 = gpu("V100-SXM-16GB", known=rates(900e9, 0.76, fp32=15.7, fp16=125))


def cluster(card, nodes=1, per_node=8, **more):
    return Cluster(name=f"{nodes}x{per_node}", nodes=nodes, per_node=per_node, gpu=card, **more)


def curve(*points):
    return Curve(points=points, source="measured")


def measured(host=None, **products):
    """A device of 1 GFLOP/s and 1 GB/s for anything large, 2 us for anything small, 5 us to issue."""
    line = curve((2e3, 2e-6), (2e9, 2.0))
    return Measured(
        device=DeviceSpeeds(
            products=products or {"fp32": line}, memory={"fp32": line}, issue_s=5e-6, post_s=30e-6, slowdown=1.25
        ),
        host=host,
        source="probe",
    )


HOST = HostSpeeds(link=curve((1e6, 1e-3), (1e9, 1.0)), adam_s=4e-9)
