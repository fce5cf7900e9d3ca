"""Errors of nnx.MoE: sizes, inputs and meshes that do not fit, each with what to do."""

from __future__ import annotations

import testing  # isort: skip

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized
from flax import nnx
from jax.sharding import PartitionSpec as P
from nnx_layers import HIDDEN, MESHES, make_layer, make_mesh, tokens

from jax_ep._src.core import errors
from jax_ep.nnx import MoE


class ErrorTest(parameterized.TestCase):
    @parameterized.parameters(
        ("fsdp", dict(hidden_size=33), "hidden_size=33 .* Use 34"),
        ("tensor", dict(intermediate_size=25), "intermediate_size=25 .* Use 26"),
    )
    def test_sizes_do_not_divide(self, mesh: str, sizes: dict[str, int], message: str):
        arguments = dict(hidden_size=32, intermediate_size=24, num_experts=8, top_k=2) | sizes
        layer = MoE(**arguments, **MESHES[mesh][2], rngs=nnx.Rngs(0))
        with jax.set_mesh(make_mesh(mesh)):
            with self.assertRaisesRegex(errors.ArgumentError, message):
                MoE(**arguments, **MESHES[mesh][2], rngs=nnx.Rngs(0))
            with self.assertRaisesRegex(errors.ArgumentError, message):
                layer(jnp.zeros((16, arguments["hidden_size"])))

    def test_wrong_input(self):
        layer = make_layer()
        for shape in ((HIDDEN,), (4, HIDDEN + 1)):
            with self.assertRaisesRegex(errors.ArgumentError, "at least one dimension"):
                layer(jnp.zeros(shape))

    def test_a_stack_and_a_transposed_router(self):
        make = nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: make_layer(rngs=rngs)))
        stack = make(nnx.Rngs(0))
        transposed = make_layer()
        transposed.router_kernel = nnx.Param(transposed.router_kernel[...].T)
        for layer in stack, transposed:
            with self.assertRaisesRegex(
                errors.ArgumentError, "router_kernel has shape .* expected"
            ):
                layer(tokens())

    def test_a_symbolic_number_of_tokens(self):
        layer = make_layer(mesh=testing.mesh_of((1,), ("expert",)))
        (size,) = jax.export.symbolic_shape("n")
        x = jax.ShapeDtypeStruct((size, HIDDEN), jnp.float32)
        with self.assertRaisesRegex(errors.ArgumentError, "x has shape .* symbolic"):
            jax.export.export(jax.jit(lambda x: layer(x)[0]))(x)

    def test_mesh_without_any_of_the_axes(self):
        layer = make_layer(expert_axis=None, tensor_axis="model")
        message = "name the mesh's in batch_axes"
        mesh = testing.mesh_of((8,), ("model",))
        with jax.set_mesh(mesh), self.assertRaisesRegex(errors.ArgumentError, message):
            layer(tokens())

    def test_mesh_without_the_expert_axis(self):
        """All experts on every rank must be asked for: built and called, by each source of a mesh."""
        mesh = testing.mesh_of((8,), ("data",))
        layer, message = make_layer(), "expected the expert axis 'expert' .*expert_axis=None"
        placed = jax.device_put(tokens(), jax.NamedSharding(mesh, P("data")))
        with self.assertRaisesRegex(errors.ArgumentError, message):
            make_layer(mesh=mesh)
        with self.assertRaisesRegex(errors.ArgumentError, message):
            layer(placed)
        with jax.set_mesh(mesh):
            with self.assertRaisesRegex(errors.ArgumentError, message):
                make_layer()
            with self.assertRaisesRegex(errors.ArgumentError, message):
                layer(tokens())

    def test_wrong_options(self):
        with self.assertRaisesRegex(errors.ArgumentError, "router='hash'"):
            make_layer(router="hash")
        with self.assertRaisesRegex(errors.ArgumentError, "tensor_axis='data'"):
            make_layer(tensor_axis="data")


if __name__ == "__main__":
    absltest.main()
