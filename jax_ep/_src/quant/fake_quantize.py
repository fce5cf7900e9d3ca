"""fake_quantize: rounding to what a format can hold, with a straight-through gradient."""

from __future__ import annotations

import functools
from typing import Any

import jax

from jax_ep._src.quant.formats import Format
from jax_ep._src.quant.quantize import dequantize, quantize


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def fake_quantize(x: jax.Array, format: Format) -> jax.Array:
    """Rounds rows to what a format can hold, with a straight-through gradient.

    The result is ``dequantize(quantize(x, format))`` in x's dtype. Its derivative is that of the
    identity, even where values saturate, as is usual in quantization-aware training.

    For example::

        x = quant.fake_quantize(x, quant.Fp8Row())

    Args:
      x: float[..., K].
      format: as in `quantize`.

    Returns:
      [..., K] in x's dtype.
    """
    return dequantize(quantize(x, format), x.dtype)


@fake_quantize.defjvp
def _fake_quantize_jvp(format: Format, primals: Any, tangents: Any) -> Any:
    return fake_quantize(*primals, format), tangents[0]
