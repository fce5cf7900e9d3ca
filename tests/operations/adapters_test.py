"""Adapters beside the weights (LoRA), against a dense layer of merged weights."""

from __future__ import annotations

from typing import Any

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep.linen
import jax_ep.nnx
from jax_ep import routing
from jax_ep._src.core import errors

HIDDEN, INTERMEDIATE, TOP_K, RANK = 16, 8, 2, 3
MESHES: dict[str, Any] = {
    "expert": ((4,), ("expert",), {}),
    "all": (
        (2, 2, 2),
        ("data", "expert", "tensor"),
        {"fsdp_axis": "data", "tensor_axis": "tensor"},
    ),
    "no_expert_axis": ((4,), ("data",), {"expert_axis": None}),
}


def make_mesh(name: str, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    shape, names, _ = MESHES[name]
    return testing.mesh_of(testing.fit(shape), names, axis_type=kind)


def draw(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) / 4


def make_adapters(num_experts: int) -> dict[str, jax.Array]:
    shapes = {"a": (HIDDEN, RANK), "b": (RANK, 2, INTERMEDIATE)}
    return {name: draw(5, num_experts, *shape) for name, shape in shapes.items()}


def lora(rows: Any, group_sizes: Any, w_up: Any, w_down: Any, adapters: Any) -> jax.Array:
    """Each rank of a tensor axis has its part of the inner dimension, of adapters too."""
    matmul = lambda x, w: jax_ep.grouped_matmul(x, w.reshape(*w.shape[:2], -1), group_sizes)
    b, size = adapters["b"], w_down.shape[1]
    if size < b.shape[-1]:
        b = lax.dynamic_slice_in_dim(b, lax.axis_index("tensor") * size, size, -1)
    h = matmul(rows, w_up) + matmul(matmul(rows, adapters["a"]), b)
    return matmul(jax.nn.silu(h[:, :size]) * h[:, size:], w_down)


def dense(params: Any, adapters: Any, x: jax.Array) -> jax.Array:
    ids, weights, _ = routing.softmax_topk(x @ params["router_kernel"], TOP_K)
    num_experts = params["router_kernel"].shape[1]
    w_up = params["w_up"][:num_experts] + jnp.einsum("ehr,ercf->ehcf", *adapters.values())
    h = jnp.einsum("th,ehcf->tecf", x, w_up)
    y = jnp.einsum(
        "tef,efh->teh", jax.nn.silu(h[:, :, 0]) * h[:, :, 1], params["w_down"][:num_experts]
    )
    hits = ids[..., None] == jnp.arange(num_experts)
    return jnp.einsum("tke,tk,teh->th", hits.astype(x.dtype), weights, y)


def assert_close(got: Any, expected: Any) -> None:
    def check(path: Any, a: Any, b: Any) -> None:
        atol = 5e-5 * np.abs(b).max(initial=0.0)
        np.testing.assert_allclose(a, b, 5e-5, atol, err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(check, got, jax.tree.map(np.asarray, expected))


class AdaptersTest(parameterized.TestCase):
    @parameterized.parameters(
        ("expert", 8, AxisType.Auto),
        ("expert", 6, AxisType.Explicit),
        ("all", 8, AxisType.Auto),
        ("no_expert_axis", 6, AxisType.Auto),
    )
    def test_modules(self, mesh: str, num_experts: int, kind: AxisType):
        """Values and gradients of both; six experts on four ranks are padded, adapters too."""
        x, adapters = draw(1, 8, HIDDEN), make_adapters(num_experts)
        sizes, options = (HIDDEN, INTERMEDIATE, num_experts, TOP_K), MESHES[mesh][2]
        with jax.set_mesh(make_mesh(mesh, kind)):
            layer = jax_ep.nnx.MoE(*sizes, experts_fn=lora, rngs=nnx.Rngs(0), **options)
            module = jax_ep.linen.MoE(*sizes, experts_fn=lora, **options)
            params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))

            @jax.jit
            @jax.value_and_grad
            def of_linen(given: Any) -> jax.Array:
                params, adapters, x = given
                y, _ = module.apply({"params": params}, x, adapters=adapters)
                return jnp.sin(y).sum()

            got = of_linen((params, adapters, x))
            of_nnx = nnx.grad(lambda adapters: jnp.sin(layer(x, adapters=adapters)[0]).sum())
            adapters_gradient = jax.tree.map(np.asarray, of_nnx(adapters))
        got, params = jax.tree.map(np.asarray, (got, params))
        loss = lambda given: jnp.sin(dense(*given)).sum()
        expected = jax.jit(jax.value_and_grad(loss))((params, adapters, x))
        assert_close(got, expected)
        assert_close(adapters_gradient, expected[1][1])

    def test_moe_mlp(self):
        params = {
            "router_kernel": draw(2, HIDDEN, 8),
            "w_up": draw(3, 8, HIDDEN, 2, INTERMEDIATE),
            "w_down": draw(4, 8, INTERMEDIATE, HIDDEN),
        }
        given = params, make_adapters(8), draw(1, 8, HIDDEN)

        def layer(params: Any, adapters: Any, x: jax.Array) -> jax.Array:
            ids, weights, _ = routing.softmax_topk(x @ params["router_kernel"], TOP_K)
            y, _ = jax_ep.moe_mlp(
                x,
                ids,
                weights,
                params["w_up"],
                params["w_down"],
                axis_name="expert",
                num_experts=8,
                experts_fn=lora,
                adapters=adapters,
            )
            return y

        sharded = P("expert")
        specs = {"router_kernel": P(), "w_up": sharded, "w_down": sharded}
        mapped = jax.shard_map(
            layer, mesh=make_mesh("expert"), in_specs=(specs, sharded, sharded), out_specs=sharded
        )
        got, expected = (
            jax.jit(jax.value_and_grad(lambda given, f=f: jnp.sin(f(*given)).sum()))(given)
            for f in (mapped, dense)
        )
        assert_close(jax.tree.map(np.asarray, got), expected)

    def test_errors(self):
        options = {"mesh": make_mesh("expert"), "rngs": nnx.Rngs(0)}
        layer = jax_ep.nnx.MoE(HIDDEN, INTERMEDIATE, 8, TOP_K, experts_fn=lora, **options)
        with self.assertRaisesRegex(errors.ArgumentError, r"adapters has shape \(7, 2\); expected"):
            layer(draw(1, 8, HIDDEN), adapters={"a": jnp.ones((7, 2))})
        layer = jax_ep.nnx.MoE(HIDDEN, INTERMEDIATE, 8, TOP_K, **options)
        with self.assertRaisesRegex(errors.ArgumentError, "adapters are given without experts_fn"):
            layer(draw(1, 8, HIDDEN), adapters=make_adapters(8))


if __name__ == "__main__":
    absltest.main()
