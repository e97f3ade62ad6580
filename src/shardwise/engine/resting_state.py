"""Optimizer states that rest in another dtype or another memory than the one in which they are updated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from shardwise.engine.shards import local

T = TypeVar("T")

COUNTER = "step"
"""Key of the update counter, which every optimizer keeps as one fp32 number."""

BUCKET_ELEMENTS = 8 * 2**20
"""Elements of this rank's shards that are brought to work at once: 64 MiB as two fp32 states."""


class RestingOptimizer(torch.optim.Optimizer):
    """Steps another optimizer bucket by bucket, on states that are brought to work for it and put back to rest.

    Between steps states are in `dtype`, on the host when `on_host` (pinned where there is an accelerator). For a step,
    a bucket's states come to the parameter's device, in the wider of `dtype` and the parameter's dtype. Weights and
    gradients that are narrower are copied too, and the weights rounded back. A state that rests as it works is updated
    in place. So the memory beyond that at rest is at most that of one bucket: the states (where copied: weights and
    gradients) of `bucket_elements` elements, or of the largest shard where that is larger.

    The worker sees this rank's part of every parameter as a plain tensor, whatever its mesh, so it has to update
    element by element, as AdamW and SGD do. It shares the groups. Hooks registered here run once per step.
    """

    def __init__(
        self,
        worker: torch.optim.Optimizer,
        *,
        dtype: torch.dtype,
        on_host: bool = False,
        bucket_elements: int | None = None,
    ) -> None:
        self.worker = worker
        self._dtype = dtype
        self._on_host = on_host
        self._bucket_elements = BUCKET_ELEMENTS if bucket_elements is None else bucket_elements
        super().__init__(worker.param_groups, worker.defaults)

    @property
    def on_host(self) -> bool:
        """Whether states rest on the host."""
        return self._on_host

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for bucket in self._buckets(group["params"]):
                self._update(group, bucket)
                self.worker.param_groups = []
                self.worker.state = defaultdict(dict)
        if self._on_host and torch.accelerator.is_available():
            torch.accelerator.synchronize()  # what rests on the host may be read from now on
        return loss

    def _buckets(self, parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        learnt = [parameter for parameter in parameters if parameter.grad is not None]
        return buckets(learnt, lambda parameter: local(parameter).numel(), self._bucket_elements)

    def _update(self, group: Mapping[str, Any], bucket: list[torch.Tensor]) -> None:
        working = {parameter: self._weight_at_work(parameter) for parameter in bucket}
        given = {
            weight: {key: state_at_work(key, value, weight) for key, value in self.state[parameter].items()}
            for parameter, weight in working.items()
            if parameter in self.state
        }
        self.worker.param_groups = [{**group, "params": list(working.values())}]
        self.worker.state = defaultdict(dict, {weight: dict(state) for weight, state in given.items()})
        self.worker.step()
        for parameter, weight in working.items():
            if weight.dtype != parameter.dtype:
                local(parameter).copy_(weight)
            for key, value in self.worker.state[weight].items():
                kept = value is given.get(weight, {}).get(key)
                self._rest(parameter, key, value, kept)

    def _weight_at_work(self, parameter: torch.Tensor) -> torch.Tensor:
        gradient = parameter.grad
        assert gradient is not None
        if isinstance(parameter, DTensor) and (
            not isinstance(gradient, DTensor) or gradient.placements != parameter.placements
        ):
            raise ValueError("a gradient is not sharded as its parameter")
        dtype = torch.promote_types(self._dtype, parameter.dtype)
        weight = local(parameter).to(dtype)
        weight.grad = local(gradient).to(dtype)
        return weight

    def _rest(self, parameter: torch.Tensor, key: str, value: torch.Tensor, kept: bool) -> None:
        """Put a state back; when the worker `kept` the tensor it got, and that was no copy, it is there already."""
        state = self.state[parameter]
        if key == COUNTER:
            state[key] = value
            return
        if key not in state:
            state[key] = self.empty_state(parameter, self._dtype)
        resting = local(state[key])
        if not kept or resting.dtype != value.dtype or resting.device != value.device:
            resting.copy_(value, non_blocking=True)

    def empty_state(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return an unfilled state of a parameter, sharded as it and where states rest."""
        device = torch.device("cpu") if self._on_host else parameter.device
        pin = self._on_host and parameter.device.type != "cpu" and torch.accelerator.is_available()
        return torch.empty_like(parameter, dtype=dtype, device=device, pin_memory=pin, requires_grad=False)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take groups and states over; states go straight to where and how they rest, never through the device."""
        super().load_state_dict({**state_dict, "state": {}})
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                if key == COUNTER:
                    self.state[parameter][key] = value
                    continue
                resting = self.empty_state(parameter, self._dtype)
                local(resting).copy_(local(value))
                self.state[parameter][key] = resting


def buckets(items: Iterable[T], elements_of: Callable[[T], int], limit: int | None = None) -> Iterator[list[T]]:
    """Yield consecutive items that together have at most `limit` elements, or one item that has more.

    `limit` is BUCKET_ELEMENTS by default.
    """
    limit = BUCKET_ELEMENTS if limit is None else limit
    bucket: list[T] = []
    elements = 0
    for item in items:
        size = elements_of(item)
        if bucket and elements + size > limit:
            yield bucket
            bucket, elements = [], 0
        bucket.append(item)
        elements += size
    if bucket:
        yield bucket


def state_at_work(key: str, value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return a state where and in the dtype in which `weight` is updated; the counter as it is."""
    if key == COUNTER:
        return value
    return local(value).to(device=weight.device, dtype=weight.dtype, non_blocking=True)


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the class of an optimizer, of the one at work where states rest elsewhere."""
    return type(optimizer.worker if isinstance(optimizer, RestingOptimizer) else optimizer).__name__


def empty_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an unfilled state of a parameter, sharded as it, where this optimizer keeps its states."""
    if isinstance(optimizer, RestingOptimizer):
        return optimizer.empty_state(parameter, dtype)
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False)


def resting_places(optimizer: torch.optim.Optimizer) -> dict[str, dict[tuple[torch.dtype, torch.device], int]]:
    """Read back what an optimizer holds on this rank: state key -> (dtype, device) -> bytes.

    An 8-bit state counts as what it is made of: codes in uint8, scales and the table of values in fp32.
    """
    places: dict[str, dict[tuple[torch.dtype, torch.device], int]] = {}
    for state in optimizer.state.values():
        for key, value in state.items():
            at = places.setdefault(key, {})
            for part in _parts(local(value)):
                place = (part.dtype, part.device)
                at[place] = at.get(place, 0) + part.numel() * part.element_size()
    return places


def _parts(value: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that a tensor is made of."""
    names = getattr(value, "tensor_attrs", None)
    return [value] if names is None else [getattr(value, name) for name in names]
