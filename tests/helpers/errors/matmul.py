"""Mistakes with grouped_matmul and its gradients: calls, by the class of their error."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import programs

import jax_ep
from errors.common import X
from jax_ep import quant


def symbolic_rows():
    """A matmul of a number of rows that is known only to the caller of the exported program."""
    rows = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("rows"), 8), np.float32)
    rhs, sizes = np.ones((1, 8, 8), np.float32), np.ones(1, np.int32)
    jax.export.export(jax.jit(lambda lhs: jax_ep.grouped_matmul(lhs, rhs, sizes)))(rows)


def matmul(lhs=np.float32, rhs=np.float32, sizes=np.int32, num_groups=2, **options):
    jax.eval_shape(
        functools.partial(jax_ep.grouped_matmul, **options),
        programs.struct((4, 8), lhs),
        programs.struct((num_groups, 8, 8), rhs),
        programs.struct((num_groups,), sizes),
    )


def matmul_of_layer(layer, **options):
    rhs, sizes = np.ones((2, 1, 8, 8), np.float32), np.ones(1, np.int32)
    return jax_ep.grouped_matmul(X[:4], rhs, sizes, layer=layer, **options)


def rhs_gradient_of_layer():
    return jax_ep.grouped_matmul_rhs_gradient(X[:4], X[:4], np.ones(1, np.int32), layer=0)


def second_derivative():
    sizes, matrices = np.array([4], np.int32), np.ones((1, 8, 8), np.float32)
    first = jax.grad(lambda lhs: jax_ep.grouped_matmul(lhs, matrices, sizes).sum())
    jax.grad(lambda lhs: first(lhs).sum())(X)


def rhs_gradient(accumulator=np.float32, shape=(2, 8, 6), out_gradient=(4, 6), **options):
    jax.eval_shape(
        lambda *arrays, accumulator: jax_ep.grouped_matmul_rhs_gradient(
            *arrays, accumulator=accumulator, **options
        ),
        programs.struct((4, 8), jnp.bfloat16),
        programs.struct(out_gradient, jnp.bfloat16),
        programs.struct((2,), np.int32),
        accumulator=programs.struct(shape, accumulator),
    )


PRODUCERS = {
    "ArgumentError": [
        lambda: matmul(num_groups=0),
        lambda: rhs_gradient(shape=(2, 6, 8)),
        lambda: rhs_gradient(transpose_rhs=True),
        lambda: rhs_gradient(out_gradient=(3, 6)),
        symbolic_rows,
        lambda: matmul_of_layer(2),
        lambda: matmul_of_layer(0, quantization=quant.Recipe()),
        lambda: rhs_gradient_of_layer(),
    ],
    "DtypeError": [
        lambda: matmul(lhs=jnp.float8_e4m3fn),
        lambda: matmul(lhs=jnp.bfloat16, rhs=jnp.float16),
        lambda: matmul(sizes=np.float32),
        lambda: jax_ep.grouped_matmul(X, np.ones((1, 8, 8), np.float32), [4]),
        lambda: matmul_of_layer(np.float32(1)),
        lambda: matmul(preferred_element_type=jnp.bfloat16),
        lambda: rhs_gradient(accumulator=jnp.bfloat16),
        lambda: rhs_gradient(preferred_element_type=jnp.bfloat16),
    ],
    "UnavailableError": [second_derivative],
}
