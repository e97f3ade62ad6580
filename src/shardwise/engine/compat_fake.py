"""Private symbols of torch and transformers that a trace needs: fake tensors, fake ranks, and what is replaced for it.

As `compat`: each function names what it stands in for, and nothing stays replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from shardwise.engine.compat import Operator, UnsupportedRelease, replaced

Kernel = Callable[[Any, tuple[Any, ...]], Any]
"""Called with an operator's result and its arguments; what it returns is the result."""


class FakeTensors(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Tensors with shapes and storages, but no memory (torch's FakeTensorMode).

    A number read from one is 0, unless it is a known constant. Meta tensors and real ones that get in are taken as fake
    ones.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.kernels: dict[Operator, Kernel] = {}
        """Operators that do something else than FakeTensorMode makes of them; for a while, by `kernel`."""
        self.trues: dict[int, int] = {}
        """Elements of a mask -> those that are true, where a program asks for their places."""
        self._waits = torch.ops._c10d_functional.wait_tensor.default

    @contextmanager
    def kernel(self, operator: Operator, kernel: Kernel) -> Iterator[None]:
        """Let `kernel` have a look at the results of `operator`, for a while."""
        self.kernels[operator] = kernel
        try:
            yield
        finally:
            del self.kernels[operator]

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator on fake tensors."""
        if func is self._waits:
            return args[0]  # a collective that is waited for gives its own result; FakeTensorMode makes another
        if any(isinstance(arg, torch.UntypedStorage) for arg in args):
            with replaced(self, "cache_enabled", False):  # the cache would keep the storage
                return super().dispatch(func, types, args, kwargs or {})
        try:
            result = super().dispatch(func, types, args, kwargs or {})
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return _zero(args[0].dtype)
        except DynamicOutputShapeException:
            if func is not torch.ops.aten.nonzero.default or args[0].numel() not in self.trues:
                raise
            with self:
                return torch.empty((self.trues[args[0].numel()], args[0].ndim), dtype=torch.int64)
        kernel = self.kernels.get(func)
        return result if kernel is None else kernel(result, tuple(args))


def _zero(dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else 0


@contextmanager
def fake_group(world: int) -> Iterator[None]:
    """Be rank 0 of a process group of `world` ranks that sends nothing (torch's test backend `fake`).

    Raises:
        RuntimeError: this process has a process group already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("this process belongs to a process group already; trace in one that does not")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    _forget_shards()
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_shards()


def _forget_shards() -> None:
    """Drop what DTensor remembers of operators: sizes of this rank's shards, which another rank would take for its own.

    It remembers by mesh and shape, not by rank (`_clear_sharding_prop_cache`), and forked ranks inherit it.
    """
    from torch.distributed.tensor import debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is None:
        raise UnsupportedRelease(f"torch {torch.__version__}: DTensor's cache of shapes cannot be cleared")
    clear()


@contextmanager
def fakes_taken_as_real(*, all_tokens: bool) -> Iterator[None]:
    """Let transformers treat fake tensors as it treats real ones.

    It looks at a mask's values to leave a mask of ones out, unless the mask is fake (`is_fake_tensor`); `all_tokens`
    is what it sees there (`fast_all`).
    """
    from transformers import masking_utils
    from transformers.utils import import_utils

    with ExitStack() as stack:
        stack.enter_context(replaced(import_utils, "is_fake_tensor", lambda _: False))
        stack.enter_context(replaced(masking_utils, "fast_all", lambda _: all_tokens))
        yield


def aten(name: str) -> Operator:
    """Return an operator of torch by its name, such as `_fused_rms_norm`.

    Raises:
        UnsupportedRelease: this release does not have it.
    """
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        raise UnsupportedRelease(f"torch {torch.__version__} has no operator aten::{name}")
    return cast(Operator, packet.default)


@contextmanager
def shards_fetched(fetch: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Let units whose shards rest on the host bring them to the device by `fetch` before they gather.

    On CPUs FSDP2 does this by `Tensor.to`, which returns the shard itself (`FSDPParam.all_gather_inputs`).
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    inputs = cast(Any, FSDPParam).all_gather_inputs.fget

    def fetched(param: Any) -> list[torch.Tensor]:
        given: list[torch.Tensor] = inputs(param)
        if not param.offload_to_cpu:
            return given
        resting = {id(param._sharded_param_data)}
        return [fetch(one) if id(one) in resting else one for one in given]

    with replaced(FSDPParam, "all_gather_inputs", property(fetched)):
        yield
