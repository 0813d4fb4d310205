"""GEMMs of linear layers in 8-bit floating point (Micikevicius et al. 2022).

The output and the input's gradient are computed from fp8 operands. Each operand is scaled so that its largest
magnitude, measured at each call, becomes the format's largest number. Sums are in fp32, results in the dtype
of the input. With tensor parallelism the magnitude is measured over the full tensor, so that slices are
rounded like the full tensor; this takes an all-reduce of two numbers in each forward and backward of a layer.

The weight's gradient is computed in 16 bits: ``torch._scaled_mm`` cannot add it to the fp32 gradient buffer,
and fp8 would need a transposed copy of both operands.

Weights only change between iterations. `Fp8Weights` keeps their magnitudes and 8-bit copies for the GEMMs of
an iteration, in row order for forward and transposed for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.config import TrainingConfig
from megalite.config.training import FP8_BLOCKS
from megalite.data.microbatch import Microbatch
from megalite.distributed.axis import Axis
from megalite.distributed.collectives import all_reduce
from megalite.kernels.library import at_run_time, one_operator
from megalite.tensor_parallel.gemm import RoundedGemm
from megalite.utils.errors import UserError
from megalite.utils.torch_private import scaled_mm, storage_number, unsafe_view

T = TypeVar("T")
E4M3, E5M2, E2M1 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2
DTYPES = {"hybrid": (E4M3, E5M2), "e4m3": (E4M3, E4M3), "e2m1": (E2M1, E2M1)}
"""Dtypes of weights and activations, and of gradients, by the config's fp8_format."""
_MIN_CAPABILITY = (8, 9)
_SMALLEST = 2.0**-100  # so that the scale of a tensor of zeros is not 0


class Fp8(NamedTuple):
    """Matrix in 8 bits: its values are ``numbers * scale``."""

    numbers: Tensor
    scale: Tensor

    def transposed(self) -> Fp8:
        """Return the transposed matrix, contiguous."""
        return Fp8(self.numbers.t().contiguous(), self.scale)


@one_operator("(Tensor x) -> Tensor", lambda x: x.new_empty((), dtype=torch.float32))
@at_run_time
def amax(x: Tensor) -> Tensor:
    """Return the largest magnitude in a tensor, an fp32 scalar; NaN if the tensor contains NaN."""
    return x.detach().abs().amax().float()


@one_operator(
    "(Tensor x, Tensor factor, ScalarType dtype) -> Tensor",
    lambda x, factor, dtype: x.new_empty(x.shape, dtype=dtype),
)
@at_run_time
def round_tensor(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x * factor`` in 8 bits, contiguous, in one pass over `x` on a GPU."""
    top = torch.finfo(dtype).max
    return (x.float() * factor).clamp(-top, top).to(dtype).contiguous()


def visible_amax(x: Tensor) -> Tensor:
    """Return `amax`, and infinity instead of NaN, which a maximum over ranks may drop."""
    largest = amax(x)
    return largest.where(largest.isfinite(), torch.inf)


def scale_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale of a tensor with this largest magnitude."""
    return largest.clamp_min(_SMALLEST) / torch.finfo(dtype).max


def in_fp8(x: Tensor, dtype: torch.dtype, largest: Tensor) -> Fp8:
    """Round a matrix to 8 bits. Infinities and NaNs stay visible in the result and in GEMMs with it.

    Args:
        largest: upper bound of the magnitudes in `x`.
    """
    scale = scale_of(largest, dtype)
    # Multiply: a compiler may round a division of each element differently.
    return Fp8(round_tensor(x, scale.reciprocal(), dtype), scale)


def scaled_gemm(a: Fp8, b: Fp8, bias: Tensor | None, dtype: torch.dtype, *, is_fast: bool) -> Tensor:
    """Compute ``a b^T + bias``: ``[n, k]`` and ``[m, k]`` -> ``[n, m]``.

    Args:
        is_fast: let Hopper GPUs accumulate with fewer bits, which are too few for gradients.
    """
    return scaled_mm(
        a.numbers,
        b.numbers.t(),  # scaled_mm requires a column-major second operand
        scale_a=a.scale,
        scale_b=b.scale,
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=is_fast,
    )


def emulated_gemm(a: Fp8, b: Fp8, bias: Tensor | None, dtype: torch.dtype, *, is_fast: bool) -> Tensor:
    """Compute `scaled_gemm` on a device without GEMMs in 8 bits, with sums in at least fp32."""
    wide = torch.promote_types(dtype, torch.float32)
    y = (a.numbers.to(wide) @ b.numbers.to(wide).t()) * (a.scale * b.scale)
    return (y if bias is None else y + bias).to(dtype)


@dataclass
class Fp8Weight:
    """Properties of a weight ``[out, in]``.

    Attributes:
        weight: the weight. While this object holds it, no other weight is at its place in memory.
        largest: largest magnitude over the ranks of tp; None if it has not been measured.
        copies: copies in 8 bits, by whether they are transposed. What a copy is depends on the recipe.
        gathered: the weight in 8 bits if it was gathered in them, and has no other memory.
    """

    weight: Tensor
    largest: Tensor | None = None
    copies: dict[bool, Any] = field(default_factory=dict)
    gathered: Fp8 | None = None


class Fp8Weights:
    """Magnitudes and 8-bit copies of a rank's weights during an iteration.

    Outside of `iteration`, where weights may change at any time, nothing is kept. A graph of torch.compile
    does not keep anything either. Weights that are gathered in 8 bits are known while they are gathered.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Fp8Weight] | None = None
        self._keeps_copies = False
        self._gathered: dict[tuple[int, int], Fp8] = {}

    def set_gathered(self, weight: Tensor, gathered: Fp8) -> None:
        """Let GEMMs use these numbers, E4M3 ``[out in]``, for a weight, which has no memory of its own."""
        self._gathered[_place(weight)] = gathered

    @contextmanager
    def iteration(self, *, keeps_copies: bool) -> Iterator[None]:
        """Keep what GEMMs in this block compute from weights, which do not change in it.

        Args:
            keeps_copies: keep the copies, 2 bytes per weight, and not only the magnitudes.
        """
        self._known, self._keeps_copies = {}, keeps_copies
        try:
            yield
        finally:
            self._known = None

    def of(self, weight: Tensor) -> Fp8Weight:
        """Return what is known of a weight; of a new one, nothing."""
        if torch.compiler.is_compiling():
            return Fp8Weight(weight)
        place, known = _place(weight), {} if self._known is None else self._known
        if place not in known:
            gathered = self._gathered.get(place)
            if gathered is not None:
                gathered = Fp8(gathered.numbers.view(weight.shape), gathered.scale)
            known[place] = Fp8Weight(weight, gathered=gathered)
        return known[place]

    def keep(self, weight: Tensor, is_transposed: bool, compute: Callable[[], T]) -> T:
        """Return a copy of a weight in 8 bits, computed now unless it was kept."""
        copies = self.of(weight).copies
        copy: T = copies[is_transposed] if is_transposed in copies else compute()
        if self._keeps_copies:
            copies[is_transposed] = copy
        return copy


def _place(weight: Tensor) -> tuple[int, int]:
    return storage_number(weight.untyped_storage()), int(weight.storage_offset())


class WeightPart(NamedTuple):
    """Consecutive elements of a rank's weight, which this replica owns.

    Attributes:
        elements: as they would be gathered, ``[n]``.
        start: index of the first one in the flat weight.
        shape: ``[..., out, in]`` of the weight.
    """

    elements: Tensor
    start: int
    shape: torch.Size


class GatheredGemm(Protocol):
    """GEMM whose weights the ranks that own parts of them can round, to the numbers of the whole weight.

    A gathered weight is an `Fp8` of these numbers and of the scales that the owners agree on; their shape and
    meaning are the recipe's.

    Attributes:
        weights: gets the gathered weights.
        scale_axes: axes, besides the owners', over which a scale is the largest.
    """

    weights: Fp8Weights
    scale_axes: tuple[Axis, ...]

    @property
    def rounds(self) -> bool:
        """Return whether GEMMs of this iteration round; otherwise weights are gathered as they are."""

    def scale_shape(self, shape: torch.Size) -> tuple[int, ...]:
        """Return the shape of the scales of a weight ``[..., out, in]``."""

    def scale_of_part(self, part: WeightPart) -> Tensor:
        """Return the scales that a part needs: 0 or more, and infinity instead of NaN.

        The scales of the weight are the largest of all parts.
        """

    def round_part(self, part: WeightPart, scale: Tensor) -> Tensor:
        """Return the elements of a part in E4M3, with the scales of the weight."""


def gather_in_8_bits(weight: nn.Parameter, gemm: GatheredGemm) -> None:
    """Let ZeRO gather a weight in 8 bits, for the GEMMs that read it."""
    weight.gathered_gemm = gemm  # type: ignore[attr-defined]


def gathered_gemm_of(weight: nn.Parameter) -> GatheredGemm | None:
    """Return the GEMMs that read a weight that is gathered in 8 bits; None for other weights."""
    return getattr(weight, "gathered_gemm", None)


class BackwardSamples:
    """Samples of the microbatch whose backward runs on this rank."""

    def __init__(self) -> None:
        self.numbers: Tensor | None = None

    def set(self, microbatch: Microbatch) -> None:
        """Note a microbatch, before its backward or a part of it."""
        self.numbers = microbatch.sample_numbers


@dataclass(frozen=True)
class Fp8Settings:
    """Settings of the linear layers' GEMMs in 8 or 4 bits.

    Attributes:
        fp8_format: a key of `DTYPES`.
        recipe: tensorwise or delayed, which scale whole tensors, or a key of `config.training.FP8_BLOCKS`.
        wide_layers: numbers of the layers whose GEMMs are in the dtype of the model.
        rounds_weight_gradients: compute weight gradients in 8 bits, with blocks.
        weights: holds weights in 8 bits during an iteration; by default they are rounded in each GEMM.
        emulates: compute GEMMs with scales of tensors without the device's GEMMs in 8 bits.
        samples: key the random rounding of gradients.
        history_length: iterations whose largest magnitudes a delayed scale can follow from.
        margin: powers of two that a delayed scale leaves between that magnitude and the format's range.
    """

    fp8_format: str
    recipe: str = "tensorwise"
    wide_layers: frozenset[int] = frozenset()
    rounds_weight_gradients: bool = True
    weights: Fp8Weights = field(default_factory=Fp8Weights)
    emulates: bool = False
    samples: BackwardSamples = field(default_factory=BackwardSamples)
    history_length: int = 1
    margin: int = 0


class TensorwiseGemm(RoundedGemm):
    """GEMMs of a linear layer in 8 bits, with a scale for each tensor.

    Args:
        tp: the axis that the layers' tensors are sharded along.
    """

    rounds = True

    def __init__(self, settings: Fp8Settings, tp: Axis) -> None:
        _, self.gradient_dtype = DTYPES[settings.fp8_format]
        self.weights = settings.weights
        self.multiply = emulated_gemm if settings.emulates else scaled_gemm
        self.tp = tp
        self.scale_axes: tuple[Axis, ...] = (tp,)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute ``x weight^T + bias``: ``[s, b, in]`` and ``[out, in]`` -> ``[s, b, out]``."""
        rows, weight = x.detach().flatten(0, -2), weight.detach()
        largest_x, largest_weight = self.scales(rows, weight)
        weight_in_fp8 = self.weights.of(weight).gathered
        if weight_in_fp8 is None:
            weight_in_fp8 = self.weights.keep(weight, False, lambda: in_fp8(weight, E4M3, largest_weight))
        own_bias = None if bias is None else bias.detach()
        y = self.multiply(in_fp8(rows, E4M3, largest_x), weight_in_fp8, own_bias, x.dtype, is_fast=True)
        return with_rows_of(x, y)

    def scales(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest magnitudes of an operand and a weight over tp, whose ranks may hold slices."""
        known = self.weights.of(weight)
        if known.gathered is not None:
            return self._largest(x)[0], known.gathered.scale  # which rounds nothing
        if known.largest is not None:
            return self._largest(x)[0], known.largest
        largest_x, known.largest = self._largest(x, weight)
        return largest_x, known.largest

    def input_gradient(self, grad: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor] | None) -> Tensor:
        """Compute ``grad weight``: ``[s, b, out]`` and ``[out, in]`` -> ``[s, b, in]``.

        Args:
            scales: result of `scales` for these tensors.
        """
        assert scales is not None
        largest_grad, largest_weight = scales
        grad_in_fp8 = in_fp8(grad.flatten(0, -2), self.gradient_dtype, largest_grad)
        known = self.weights.of(weight)

        def transposed() -> Fp8:
            if known.gathered is not None:
                return known.gathered.transposed()
            return in_fp8(weight.t(), E4M3, largest_weight)

        weight_in_fp8 = self.weights.keep(weight, True, transposed)
        return with_rows_of(grad, self.multiply(grad_in_fp8, weight_in_fp8, None, grad.dtype, is_fast=False))

    def scale_shape(self, shape: torch.Size) -> tuple[int, ...]:
        """Return the shape of one number."""
        return ()

    def scale_of_part(self, part: WeightPart) -> Tensor:
        """Return the scale that a part needs."""
        return scale_of(visible_amax(part.elements), E4M3)

    def round_part(self, part: WeightPart, scale: Tensor) -> Tensor:
        """Return the elements of a part in E4M3, with the scale of the weight."""
        return round_tensor(part.elements, scale.reciprocal(), E4M3)

    def _largest(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return all_reduce(torch.stack([amax(x) for x in tensors]), self.tp, dist.ReduceOp.MAX).unbind()


def with_rows_of(x: Tensor, y: Tensor) -> Tensor:
    """Reshape `y` ``[s b, out]`` to ``[s, b, out]``, by the shape of `x` ``[s, b, in]``."""
    # Return a tensor that is not a view: the ranks sum it in place.
    return unsafe_view(y, (*x.shape[:-1], y.shape[-1]))


def has_gemms_in_8_bits(device: torch.device) -> bool:
    """Return whether a device multiplies in 8 bits faster than in 16."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY


def check_device(device: torch.device, training: TrainingConfig) -> None:
    """Check that a device has the GEMMs in 8 bits that a config needs.

    Raises:
        UserError: the device has none.
    """
    if training.fp8_format is None or training.emulate:
        return
    flag = training.fp8_flag
    if training.fp8_recipe in FP8_BLOCKS:
        raise UserError(
            f"{flag} with --fp8-recipe {training.fp8_recipe}: megalite has no GPU kernels for it yet; "
            "pass --emulate to compute its numbers with GEMMs in the dtype of the model, or --fp8-format "
            "hybrid --fp8-recipe tensorwise"
        )
    if has_gemms_in_8_bits(device):
        return
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else f"this run is on {device.type}"
    raise UserError(
        f"{flag}: GEMMs in 8 bits need a GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell), "
        f"and {what}: remove the flag, or pass --emulate to compute what such a GPU would, slowly"
    )
