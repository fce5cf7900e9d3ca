"""Programs that no kernel takes, one for each reason of the warning."""

from __future__ import annotations

import functools
import unittest.mock

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import programs
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from quantized import Fp8Block32, Mxfp8

import jax_ep
from errors.common import MESH, RANKS
from errors.quantization import quantized_matmul
from jax_ep import quant
from jax_ep._src.matmul.grouped_matmul_mxfp4 import weights_only_matmul
from jax_ep._src.matmul.params import GroupedMatmulParams
from jax_ep._src.transfer import primitives


def each_quantized_fallback():
    """Lowers quantizing, and matmuls of quantized operands, that no kernel takes, for each reason."""
    rows = quant.quantize(np.ones((4, 16), np.float32), quant.Fp8Row())
    weights = quant.quantize_weights(np.ones((2, 16, 8), np.float32), quant.Fp8Row())

    def lower(lhs, rhs):
        call = lambda: jax_ep.grouped_matmul(lhs, rhs, np.ones(2, np.int32))
        programs.lower_for_cuda(call)

    programs.lower_for_cuda(quantized_matmul)
    with jax.enable_x64(True):
        wide = np.ones((2, 16, 8), np.float64)
        programs.lower_for_cuda(lambda: quant.quantize_weights(wide, quant.Fp8Block128()))
    lower(quant.quantize(np.ones((4, 16), np.float32), quant.Fp8Block128()), weights)
    lower(quant.Quantized(rows.values, rows.scales[:1], rows.format), weights)
    others = quant.quantize(np.ones((64, 64), np.float32), Fp8Block32())
    programs.lower_for_cuda(lambda: quant.quantize(np.ones((4, 32), np.float32), Mxfp8()))
    send = functools.partial(jax_ep.dispatch, num_experts=8, axis_name="expert")
    sent = jax.shard_map(
        lambda rows, ids: send(rows, ids, None).rows.scales,
        mesh=testing.expert_mesh(1),
        in_specs=P("expert"),
        out_specs=P("expert"),
    )
    programs.lower_for_cuda(lambda: sent(others, np.zeros((64, 2), np.int32)))
    with unittest.mock.patch.object(
        jax_ep._src.core.runtime, "compute_capabilities", lambda: {"8.0"}
    ):
        lower(rows, weights)
        lower_four_bits()
    lower_four_bits(dtype=np.float16)
    lower_four_bits(format=quant.MxFp8())
    lower_four_bits(columns=12)
    lower_four_bits(num_scales=1)


def lower_four_bits(dtype=jnp.bfloat16, format=quant.MxFp4(), columns=8, num_scales=None):
    weights = quant.quantize(np.ones((2, columns, 64), np.float32), format)
    weights = quant.Quantized(weights.values, weights.scales[:, :num_scales], format)
    params = GroupedMatmulParams(
        transpose_rhs=True, out_dtype=dtype, zero_tail=True, num_sms=0, implementation=None
    )
    rows = jnp.ones((4, 64), dtype)
    sizes = np.ones(2, np.int32)
    programs.lower_for_cuda(lambda: weights_only_matmul(rows, weights, sizes, params))


def each_transfer_fallback():
    """Lowers transfers that no kernel takes, for each reason."""
    wide = AbstractMesh((300,), ("expert",), axis_types=(AxisType.Auto,))
    wide_domains = AbstractMesh((128,), ("expert",), axis_types=(AxisType.Auto,))
    lower_transfer(MESH, lowering={"cuda_build": False})
    lower_transfer(MESH, hidden=3)
    lower_transfer(wide)
    lower_transfer(MESH, top_k=65)
    lower_transfer(MESH, num_experts=2048 + RANKS)
    lower_transfer(MESH, recv_capacity=2**30 + 1)
    lower_transfer(MESH, nvlink_domain_size=1, hidden=2**18)
    lower_transfer(wide_domains, nvlink_domain_size=1)
    with unittest.mock.patch.object(primitives, "host_of", lambda device: device.id):
        lower_transfer(MESH, nvlink_domain_size=1)


def lower_transfer(mesh, hidden=8, top_k=2, num_experts=None, lowering=None, **options):
    def f(x, ids):
        return jax_ep.dispatch(
            x,
            ids,
            None,
            num_experts=num_experts or jax.lax.axis_size("expert"),
            axis_name="expert",
            **options,
        ).rows

    tokens = mesh.shape["expert"]
    mapped = jax.shard_map(f, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    x, ids = programs.struct((tokens, hidden)), programs.struct((tokens, top_k), np.int32)
    programs.lower_for_cuda(mapped, x, ids, **lowering or {})
