"""Quantized: the pytree of eight-bit values, their scales and their format."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jax_ep._src.core.errors import ArgumentError, DtypeError
from jax_ep._src.quant.formats import Format, check_format, num_blocks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Quantized:
    """Values of eight or four bits and their scales: a pytree with a static format.

    `jax_ep.quant.quantize` makes one. For a checkpoint that is quantized already, the constructor
    is enough::

        weight, weight_scale_inv = jnp.ones((256, 128), jnp.float8_e4m3fn), jnp.ones((2, 1))
        quantized = quant.Quantized(weight, weight_scale_inv, quant.Fp8Block128())

    ``==`` and hashes go by identity, as for all pytrees of jax_ep, so compare the arrays.

    Attributes:
      values: float8[...], or float4_e2m1fn[...] for a format of four bits.
      scales: [...] of the format's `scale_dtype`, with as many axes as values. An axis has as many
        scales as values, or one per `block` of the format, or a single one.
      format: the format (static).
      tensor_scale: float32[] for `NvFp4`, or one per matrix, with the first axes of matrices
        [..., N, K]; None for other formats.
    """

    values: jax.Array
    scales: jax.Array
    format: Format = dataclasses.field(metadata={"static": True})
    tensor_scale: jax.Array | None = None

    instead_of_array: ClassVar[str] = (
        "Use jax_ep.quant.dequantize, or give the array before it was quantized."
    )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.values.ndim

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The number of values that share a scale, along each axis."""
        if len(self.scales.shape) != len(self.shape):
            raise self._bad_scales()
        return tuple(map(self._block, self.shape, self.scales.shape))

    def packed(self) -> jax.Array:
        """Returns four-bit values as bytes uint8[..., K / 2], the first of two in the low bits."""
        _check_four_bits(self.format)
        pairs = self.values.reshape(*self.shape[:-1], -1, 2)
        return jax.lax.bitcast_convert_type(pairs, jnp.uint8)

    @classmethod
    def from_packed(
        cls,
        values: jax.Array,
        scales: jax.Array,
        format: Format,
        tensor_scale: jax.Array | None = None,
    ) -> Quantized:
        """Takes bytes of two values each, as `packed` returns them, and bytes of scales.

        Args:
          values: uint8[..., K / 2]. For gpt-oss's blocks [..., K / 32, 16] join the last two axes.
          scales: uint8[..., K / 32] or [..., K / 16], or of the format's `scale_dtype`.
          format: a format of four bits.
          tensor_scale: as in `Quantized`.
        """
        _check_four_bits(format)
        pairs = jax.lax.bitcast_convert_type(jnp.asarray(values), format.dtype)
        scales = jnp.asarray(scales)
        if scales.dtype == jnp.uint8:
            scales = jax.lax.bitcast_convert_type(scales, format.scale_dtype)
        quantized = cls(pairs.reshape(*values.shape[:-1], -1), scales, format, tensor_scale)
        check("quant.Quantized.from_packed", quantized)
        return quantized

    @property
    def mT(self) -> Quantized:
        """Exchanges the last two axes of values and scales, without rounding."""
        return dataclasses.replace(self, values=self.values.mT, scales=self.scales.mT)

    def transposed_scales(self) -> jax.Array:
        """Returns the scales as other block-scaled matmuls of Hopper GPUs read them, by TMA.

        DeepGEMM and MAX read scales with the rows innermost and the number of rows rounded up,
        because TMA copies lines of a multiple of 16 bytes.

        Returns:
          float32[..., S, M'] for scales of shape [..., M, S]; M' is M rounded up to a multiple of
          4. The added scales are 1.
        """
        transposed = self.scales.mT
        padding = [(0, 0)] * (transposed.ndim - 1) + [(0, -transposed.shape[-1] % 4)]
        return jnp.pad(transposed, padding, constant_values=1)

    def to_qwix(self) -> Any:
        """Returns a `qwix.QArray` of the same arrays, whose blocks must be whole.

        Its scales are float32 with the tensor's scale in them, if there is one.
        """
        block_shape = self.block_shape
        if any(size % block for size, block in zip(self.shape, block_shape, strict=True)):
            raise ArgumentError(
                f"jax_ep.quant: values of shape {self.shape} have partial blocks of {block_shape}; "
                "expected whole ones, as qwix.QArray has no others. Pad the array first."
            )
        from qwix import QArray  # optional

        scales = self.scales
        if self.tensor_scale is not None:
            scales = with_tensor_scale(scales, self.tensor_scale)
        return QArray(qvalue=self.values, scale=scales, qtype=self.values.dtype)

    @classmethod
    def from_qwix(cls, array: Any, format: Format) -> Quantized:
        """Takes the arrays of a `qwix.QArray` that is quantized symmetrically, as `format` says."""
        if getattr(array, "zero_point", None) is not None:
            raise ArgumentError(
                "jax_ep.quant: the QArray has a zero point; expected none. Quantize it "
                "symmetrically."
            )
        if not (hasattr(array, "qvalue") and hasattr(array, "scale")):
            raise DtypeError(
                f"jax_ep.quant: array is a {type(array).__name__}; expected a qwix.QArray. Give "
                "other arrays to the constructor: Quantized(values, scales, format)."
            )
        quantized = cls(array.qvalue, array.scale, format)
        check("quant.Quantized.from_qwix", quantized)
        return quantized

    def _block(self, num_values: int, num_scales: int) -> int:
        if num_scales == num_values:
            return 1
        block = self.format.block
        if num_scales != num_blocks(num_values, block):
            raise self._bad_scales()
        return max(num_values, 1) if block is None else block

    def _bad_scales(self) -> ArgumentError:
        block = self.format.block
        per_axis = "a single one" if block is None else f"one per {block}"
        return ArgumentError(
            f"jax_ep.quant: scales have shape {self.scales.shape} with values of shape "
            f"{self.shape}; expected along each axis as many scales as values, or {per_axis}, by "
            f"the format {self.format}. Give the format that the arrays have."
        )


def with_tensor_scale(scales: jax.Array, tensor_scale: jax.Array | None) -> jax.Array:
    """Returns the scales of blocks times that of their tensor, if there is one, in float32."""
    scales = scales.astype(jnp.float32)
    return scales if tensor_scale is None else scales * aligned(tensor_scale, scales.ndim)


def aligned(tensor_scale: jax.Array, ndim: int) -> jax.Array:
    """Gives a tensor's scale, which has the first axes of its values or none, as many axes."""
    return tensor_scale.reshape(*tensor_scale.shape, *(1,) * (ndim - tensor_scale.ndim))


def as_bits[T](tree: T) -> T:
    """Returns a tree whose quantized arrays are integers: they have no derivative.

    They can be kept for a backward pass, too. jax.checkpoint rounds floats that it keeps by
    `lax.reduce_precision`, which takes the largest values of E4M3 for infinities.
    """
    return _recast(
        tree, lambda x: (unsigned(x.format.dtype), unsigned(x.format.scale_dtype), jnp.uint32)
    )


def from_bits[T](tree: T) -> T:
    """Returns the tree that `as_bits` was given."""
    return _recast(tree, lambda x: (x.format.dtype, x.format.scale_dtype, jnp.float32))


def unsigned(dtype: Any) -> Any:
    """Returns the unsigned integers of a float dtype's size."""
    return jnp.dtype(f"uint{jnp.finfo(dtype).bits}")


def row_bytes(rows: Any) -> int:
    """Returns the bytes of a row [H]: two values of four bits share one."""
    arrays = (rows.values, rows.scales) if isinstance(rows, Quantized) else (rows,)
    return sum(-(-x.shape[-1] * jax.dtypes.itemsize_bits(x.dtype) // 8) for x in arrays)


def _check_four_bits(format: Format) -> None:
    if unsigned(format.dtype) != jnp.uint4:
        raise DtypeError(
            f"jax_ep.quant: values are {format.dtype}; expected a format of four bits, as others "
            "have bytes already. Use values.view(jnp.uint8)."
        )


def _recast[T](tree: T, dtypes: Callable[[Quantized], tuple[Any, Any, Any]]) -> T:
    def recast(node: Any) -> Any:
        if not isinstance(node, Quantized):
            return node
        of_values, of_scales, of_tensor = dtypes(node)
        cast = jax.lax.bitcast_convert_type
        scale = node.tensor_scale
        return Quantized(
            cast(node.values, of_values),
            cast(node.scales, of_scales),
            node.format,
            None if scale is None else cast(scale, of_tensor),
        )

    return jax.tree.map(recast, tree, is_leaf=lambda node: isinstance(node, Quantized))


def check(operation: str, x: Quantized) -> None:
    """Raises if the arrays do not have the dtypes and shapes of the format."""
    check_format(operation, x.format)
    for name, array in ("values", x.values), ("scales", x.scales):
        if not (hasattr(array, "shape") and hasattr(array, "dtype")):
            raise DtypeError(
                f"jax_ep.{operation}: quantized {name} are a {type(array).__name__}; expected an "
                "array. Give both: jax_ep.quant.Quantized(values, scales, format)."
            )
    dtype, expected = jnp.dtype(x.values.dtype), x.format.dtype
    if dtype != expected:
        raise DtypeError(
            f"jax_ep.{operation}: quantized values have dtype {dtype}; expected {expected}, by "
            f"their format {x.format}. Give the format that they have, or view bytes as what they "
            f"are: values.view(jnp.{expected})."
        )
    dtype, expected = jnp.dtype(x.scales.dtype), x.format.scale_dtype
    if dtype != expected:
        advice = (
            f"Cast them: scales.astype(jnp.{expected})."
            if jnp.issubdtype(dtype, jnp.floating)
            else f"For bytes of E8M0: scales.view(jnp.float8_e8m0fnu).astype(jnp.{expected})."
        )
        raise DtypeError(
            f"jax_ep.{operation}: quantized scales have dtype {dtype}; expected {expected}. "
            f"{advice}"
        )
    _ = x.block_shape
    check_tensor_scale(operation, x.format, x.shape, x.tensor_scale)


def check_tensor_scale(
    operation: str, format: Format, shape: tuple[int, ...], tensor_scale: Any
) -> None:
    """Raises unless it is there if the format has one, float32, with the first axes of matrices."""
    if not format.has_tensor_scale:
        if tensor_scale is not None:
            raise ArgumentError(
                f"jax_ep.{operation}: tensor_scale is given with the format {format}; expected "
                "None, as this format has no scale per tensor. Leave it out."
            )
        return
    shapes = dict.fromkeys(((), shape[: max(len(shape) - 2, 0)]))
    if not (hasattr(tensor_scale, "shape") and hasattr(tensor_scale, "dtype")):
        found = f"a {type(tensor_scale).__name__}"
    elif tensor_scale.dtype != jnp.float32:
        found = f"of dtype {tensor_scale.dtype}"
    elif tensor_scale.shape not in shapes:
        found = f"of shape {tensor_scale.shape}"
    else:
        return
    raise DtypeError(
        f"jax_ep.{operation}: tensor_scale is {found} with values of shape {shape}; expected "
        f"float32 of shape {' or '.join(map(str, shapes))}, by the format {format}. Give the one "
        "by which the scales were computed."
    )
