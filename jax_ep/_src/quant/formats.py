"""Eight-bit formats: which values share a scale, and how it follows from them."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jax_ep._src.core.errors import ArgumentError, DtypeError

BLOCK = 128
"""Values per scale of the kernels that have blocks, along each blocked axis."""

LEAST_SCALE = 2.0**-125
"""A scale of this size and its reciprocal are normal in float32, also after rounding."""

ScaleRounding = Literal["none", "power_of_two"]
"""``"power_of_two"`` rounds scales up to powers of two, so that scaling is exact."""


@dataclasses.dataclass(frozen=True)
class Format(abc.ABC):
    """How values are quantized: `Fp8Block128` or `Fp8Row`, compared and hashed by value.

    Operations ask a format for these properties and never for its class.
    """

    @property
    @abc.abstractmethod
    def scale_rounding(self) -> ScaleRounding:
        """Whether scales are rounded to powers of two (``"power_of_two"``) or not (``"none"``)."""

    @property
    @abc.abstractmethod
    def min_amax(self) -> float:
        """The lower bound of the largest magnitude from which a scale is computed."""

    @property
    @abc.abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""

    @property
    def scale_dtype(self) -> np.dtype[Any]:
        """The dtype of the scales."""
        return jnp.dtype(jnp.float32)

    @property
    def has_tensor_scale(self) -> bool:
        """Whether a float32 scale of the whole tensor multiplies those of blocks."""
        return False

    @property
    @abc.abstractmethod
    def block(self) -> int | None:
        """How many values of a row share a scale; None if the whole row does."""

    @property
    def matrix_block(self) -> tuple[int, int | None]:
        """How many rows and columns of a matrix [N, K] share a scale; None as in `block`."""
        return 1, self.block

    @property
    def is_blocked(self) -> bool:
        """Whether a row has one scale per block rather than a single one."""
        return self.block is not None

    @property
    def has_square_blocks(self) -> bool:
        """Whether transposing a quantized matrix equals quantizing the transposed matrix."""
        rows, columns = self.matrix_block
        return rows == columns

    @property
    def least_amax(self) -> float:
        """The least `min_amax` whose scale, and that scale's reciprocal, are normal in float32."""
        return LEAST_SCALE * float(jnp.finfo(self.dtype).max)

    def for_weights(self) -> Format:
        """Returns the format of the weights that rows of this format are multiplied by."""
        default: Any = type(self).min_amax
        return self.with_min_amax(default)

    def for_cotangents(self) -> Format:
        """Returns this format with the least `min_amax`, as gradients may be of any magnitude."""
        return self.with_min_amax(self.least_amax)

    def with_min_amax(self, min_amax: float) -> Format:
        """Returns this format with another `min_amax`."""
        changes: dict[str, Any] = {"min_amax": min_amax}
        return dataclasses.replace(self, **changes)

    def _check(self) -> None:
        if self.scale_rounding not in ("none", "power_of_two"):
            raise ArgumentError(
                f"jax_ep.quant: scale_rounding={self.scale_rounding!r}; expected 'none' or "
                "'power_of_two'. Use 'power_of_two' if values are scaled again without rounding."
            )
        is_number = isinstance(self.min_amax, int | float)
        if not (is_number and self.least_amax <= self.min_amax < math.inf):
            raise ArgumentError(
                f"jax_ep.quant: min_amax={self.min_amax!r}; expected a finite Python number of at "
                f"least {self.least_amax}, as scales below 2^-125 leave float32's normal range. "
                "format.for_cotangents() has the least one."
            )


@dataclasses.dataclass(frozen=True)
class Fp8Block128(Format):
    """E4M3 values with a float32 scale per 128 values of a row, or per 128 x 128 of a matrix.

    This is the format of DeepSeek-V3. A scale is the block's largest magnitude, at least
    `min_amax`, times 1 / 448. The last block of an axis is partial if 128 does not divide the axis.

    For example::

        rows = quant.quantize(x, quant.Fp8Block128("power_of_two"))

    Attributes:
      scale_rounding: ``"none"`` or ``"power_of_two"``.
      min_amax: 1e-4 by default, as in DeepSeek-V3. Blocks whose largest magnitude is smaller lose
        accuracy, and those below 1e-4 / 448 / 1024 become zeros. A `Recipe` avoids this loss for
        cotangents by quantizing them with `for_cotangents`.
    """

    scale_rounding: ScaleRounding = "none"
    min_amax: float = 1e-4

    def __post_init__(self) -> None:
        self._check()

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return jnp.dtype(jnp.float8_e4m3fn)

    @property
    def block(self) -> int:
        """How many values of a row share a scale."""
        return BLOCK

    @property
    def matrix_block(self) -> tuple[int, int]:
        """How many rows and columns of a matrix share a scale."""
        return BLOCK, BLOCK


@dataclasses.dataclass(frozen=True)
class Fp8Row(Format):
    """E4M3 or E5M2 values with one float32 scale per row, or per channel of a matrix.

    A scale is the row's largest magnitude, at least `min_amax`, times the reciprocal of the
    dtype's largest value.

    For example::

        cotangents = quant.quantize(x, quant.Fp8Row(jnp.float8_e5m2))

    Attributes:
      dtype: float8_e4m3fn (values up to 448) or float8_e5m2 (up to 57344).
      scale_rounding: ``"none"`` or ``"power_of_two"``.
      min_amax: 1e-30 by default.
    """

    dtype: Any = jnp.float8_e4m3fn
    scale_rounding: ScaleRounding = "none"
    min_amax: float = 1e-30

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", eight_bit_dtype(self.dtype))
        self._check()

    @property
    def block(self) -> None:
        """None: the whole row shares a scale."""
        return None

    def for_weights(self) -> Fp8Row:
        """Returns the format of the weights: E4M3, whatever the rows' dtype."""
        return Fp8Row(jnp.float8_e4m3fn, self.scale_rounding)


def eight_bit_dtype(dtype: Any) -> np.dtype[Any]:
    """Returns the dtype of a format's values. Raises unless it is E4M3 or E5M2."""
    with contextlib.suppress(TypeError):  # numpy may not know it
        dtype = jnp.dtype(dtype)
    if dtype not in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        raise DtypeError(
            f"jax_ep.quant: dtype={dtype}; expected float8_e4m3fn or float8_e5m2. Use E4M3 "
            "for rows and weights, and E5M2 for gradients."
        )
    checked: np.dtype[Any] = dtype
    return checked


def row_scales(format: Format, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of the scales of rows [..., K]."""
    *leading, size = shape
    return *leading, num_blocks(size, format.block)


def matrix_scales(format: Format, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of the scales of matrices [..., N, K]."""
    *leading, n, k = shape
    rows, columns = format.matrix_block
    return *leading, num_blocks(n, rows), num_blocks(k, columns)


def num_blocks(size: int, block: int | None) -> int:
    """Returns how many scales an axis has."""
    return 1 if block is None else -(-size // block)


def has_kernels(format: Format) -> bool:
    """Whether CUDA kernels read and write scales of this dtype, for as many values each."""
    is_known = format.matrix_block in ((1, None), (BLOCK, BLOCK))
    return is_known and format.scale_dtype == jnp.float32


def check_no_tensor_scale(operation: str, format: Format) -> None:
    """Raises for a format with a scale per tensor, of which ranks have parts."""
    if format.has_tensor_scale:
        raise ArgumentError(
            f"jax_ep.{operation}: the format {format} has a scale per tensor, of which each rank "
            "would compute its own; expected a format without one. Use MxFp4()."
        )


def check_format(operation: str, format: Any) -> None:
    """Raises unless it is a format."""
    if not isinstance(format, Format):
        raise DtypeError(
            f"jax_ep.{operation}: format={format!r}; expected a jax_ep.quant.Fp8Block128 or "
            "Fp8Row. Formats are values: call the class, as in Fp8Block128()."
        )
