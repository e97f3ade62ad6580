"""The stage of a program: its parameters and the parts that all families share."""

from __future__ import annotations

from shardwise.predict.blocks import activations, norms, ops, split_layers
from shardwise.predict.blocks.setting import Layers, Setting
from shardwise.predict.blocks.tape import UNCOUNTED, Storage, Tape, Tensor
from shardwise.predict.quantized import packed_bytes
from shardwise.spec import model_spec


class Scene:
    """One block at work on a tape."""

    def __init__(self, tape: Tape, layers: Layers, setting: Setting) -> None:
        self.tape, self.layers, self.setting = tape, layers, setting
        self.attention = layers.kind.attention
        self.mlp = layers.kind.mlp
        self._parameters: dict[str, Tensor] = {}
        self._splits_heads = any(
            site.word == "colwise" and "att" in name.partition(".")[0] for name, site in layers.sites.items()
        )

    def parameter(self, name: str, share: int = 1) -> Tensor:
        """Return the gathered parameter of that name, the same one at every call; `share`: ranks that split it."""
        known = self._parameters.get(name)
        if known is None:
            elements, trains = self.layers.sizes[name] // share, name in self.layers.trained
            known = self._parameters[name] = self.tape.parameter(elements, self.setting.item, trains=trains)
        return known

    def adapter(self, name: str, elements: int) -> Tensor:
        """Return one half of an adapter."""
        known = self._parameters.get(name)
        if known is None:
            known = self._parameters[name] = self.tape.parameter(elements, self.setting.item, trains=True)
        return known

    def shared(self, elements: int) -> Tensor:
        """Return a tensor that all blocks are given, such as a rotary table; counted once for all of them."""
        return Tensor(Storage(self.tape.memory, 0, UNCOUNTED), elements, self.setting.item)

    def project(self, name: str, x: Tensor, *, flat: bool = False) -> Tensor:
        """A linear layer, with its adapter; `flat`: x is [tokens, width]."""
        site = self.layers.sites[name]
        if site.word is not None:
            return split_layers.project(self, name, x)
        tape, item, autocast = self.tape, self.setting.item, self.setting.program.autocast
        bias = self.parameter(f"{name}.bias") if site.bias else None
        packed = self._packed(f"{name}.weight")
        taken = ops.cast(tape, x, item) if autocast else x
        weight = self.parameter(f"{name}.weight")
        narrow = self.narrow(f"{name}.weight")
        result = ops.linear(tape, taken, weight, bias, inputs=site.inputs, flat=flat, packed=packed, narrow=narrow)
        del taken
        if packed and autocast:
            result = ops.cast(tape, result, x.item)
        if not site.rank:
            return result
        a = self.adapter(f"{name}.A", site.inputs * site.rank)
        b = self.adapter(f"{name}.B", site.outputs * site.rank)
        dropped = self.drop(ops.cast(tape, x, ops.FLOAT) if autocast else x, self.layers.dropout)
        dropped = ops.cast(tape, dropped, item) if autocast else dropped
        low = ops.linear(tape, dropped, a, inputs=site.inputs, flat=flat)
        del dropped
        return ops.add(tape, result, ops.scale(tape, ops.linear(tape, low, b, inputs=site.rank, flat=flat)))

    def narrow(self, weight: str) -> bool:
        """Whether a matrix is multiplied in fp8: those of blocks may be."""
        return self.setting.program.fp8_linears and self._of_block(weight) is not None

    def _of_block(self, weight: str) -> model_spec.Tensor | None:
        return next((tensor for tensor in self.layers.kind.tensors if tensor.name == weight), None)

    def _packed(self, weight: str) -> int:
        """Return the bytes of a quantised matrix: frozen ones of blocks are; 0 where it is not."""
        kind = self.setting.program.base_quantization
        if kind is None or weight in self.layers.trained:
            return 0
        found = self._of_block(weight)
        return packed_bytes(found.shape[0], found.shape[-1], kind) if found is not None else 0

    def enter(self, part: str, x: Tensor) -> Tensor:
        """What a part of the block (`self_attn`, `mlp`) works on, of what it is given."""
        if self.setting.tensor == 1:
            return x
        return split_layers.enter(self, part, x)

    def norm(self, name: str, x: Tensor) -> Tensor:
        """The family's norm, as its own code or as one kernel."""
        tape = self.tape
        tape.distributed = self.setting.sequence_parallel
        made = self._norm(f"{name}.weight", f"{name}.bias", x)
        tape.distributed = False
        return made

    def _norm(self, weight_name: str, bias_name: str, x: Tensor) -> Tensor:
        tape, setting, kind = self.tape, self.setting, self.layers.norm
        weight = self.parameter(weight_name)
        if kind in norms.PLAIN:
            fused = setting.fused_norms or setting.compiled
            return norms.fused_rms(tape, x, weight) if fused else norms.PLAIN[kind](tape, x, weight)
        bias = self.parameter(bias_name) if bias_name in self.layers.sizes else None
        if setting.program.autocast:
            x = ops.cast(tape, x, ops.FLOAT)
        function = norms.layer if kind == "layer" else norms.layer_plus_one
        return function(tape, x, weight, bias, setting.device)

    def act(self, x: Tensor) -> Tensor:
        """The block's activation function."""
        return activations.apply(self.tape, x, self.layers.activation)

    def gate(self, first: Tensor, second: Tensor) -> Tensor:
        """`act(first) * second` where blocks are compiled: one kernel, which saves both."""
        return activations.gated(self.tape, first, second)

    def rate(self, name: str, default: float) -> float:
        """A dropout rate of the configuration."""
        given = self.layers.config.get(name)
        return float(given) if isinstance(given, int | float) else default

    def drop(self, x: Tensor, rate: float) -> Tensor:
        """Dropout."""
        return ops.dropout(self.tape, x, self.setting.device) if rate and self.setting.training else x

    def heads(self, name: str, x: Tensor) -> Tensor:
        """A projection seen as [rows, heads, length, dim]."""
        return ops.view(self.tape, self.project(name, x), grad_copied=True)

    @property
    def tokens(self) -> int:
        """Tokens inside attention and MLP."""
        return self.setting.rows * self.setting.padded_length

    @property
    def masked(self) -> bool:
        """Attention is given a mask: rows differ in length, or tokens do not look back on all before them."""
        window = self.attention.window
        return (
            self.setting.padded or self.layers.masked or (window is not None and self.setting.padded_length >= window)
        )

    def own_heads(self) -> tuple[int, int]:
        """Query heads and key-value heads of one rank."""
        ranks, attention = self.setting.tensor, self.attention
        if not self._splits_heads:
            return attention.heads, attention.kv_heads
        return attention.heads // ranks, attention.kv_heads // ranks
