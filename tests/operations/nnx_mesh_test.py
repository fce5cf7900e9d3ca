"""nnx.MoE finds its mesh wherever JAX can tell it, and otherwise says what to give."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import testing  # isort: skip

import jax
import numpy as np
import tier
from absl.testing import absltest, parameterized
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep._src.core import errors
from jax_ep.nnx import MoE

HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K, NUM_TOKENS = 16, 8, 8, 2, 32
MESH = testing.mesh_of((testing.NUM_DEVICES,), ("expert",))
ONE_DEVICE = testing.mesh_of((1,), ("expert",))


def make_layer(**options: Any) -> MoE:
    return MoE(HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K, rngs=nnx.Rngs(0), **options)


def tokens() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (NUM_TOKENS, HIDDEN))


@contextlib.contextmanager
def with_block() -> Iterator[None]:
    """A ``with mesh:`` block, as older code has it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        MESH.__enter__()
    try:
        yield
    finally:
        MESH.__exit__(None, None, None)


SOURCES: dict[str, Any] = {
    # name: (context, options of the layer, whether the layer is made in the context)
    "argument": (contextlib.nullcontext, {"mesh": MESH}, True),
    "set_mesh": (lambda: jax.set_mesh(MESH), {}, True),
    "set_mesh_for_the_call": (lambda: jax.set_mesh(MESH), {}, False),
    "with_block": (with_block, {}, True),
    "with_block_for_the_call": (with_block, {}, False),
}


@jax.jit
def forward(graph_and_state: Any, x: jax.Array) -> Any:
    return nnx.merge(*graph_and_state)(x)


class KnownMeshTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.expected = make_layer(mesh=ONE_DEVICE)(tokens())

    def assert_sharded(self, results: Any) -> None:
        """The numbers are right, and the experts' outputs lie on all devices."""
        y, stats = results
        self.assertLen(y.sharding.device_set, testing.NUM_DEVICES)
        np.testing.assert_allclose(y, self.expected[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(stats.expert_load, self.expected[1].expert_load)

    @parameterized.product(source=list(SOURCES), jitted=[False, True])
    def test_source(self, source: str, jitted: bool):
        context, options, made_inside = SOURCES[source]
        with context() if made_inside else contextlib.nullcontext():
            layer = make_layer(**options)
        with context():
            run = forward(nnx.split(layer), tokens()) if jitted else layer(tokens())
        self.assert_sharded(run)

    def test_shardings_of_the_parameters(self):
        """Made under a mesh and called outside of it."""
        with jax.set_mesh(MESH):
            layer = make_layer()
        self.assert_sharded(layer(tokens()))

    def test_sharding_of_the_tokens(self):
        x = jax.device_put(tokens(), NamedSharding(MESH, P("expert")))
        self.assert_sharded(make_layer()(x))

    def test_explicit_shardings_inside_jit(self):
        """The types of Explicit axes carry their mesh into a jit."""
        mesh = testing.mesh_of(
            (testing.NUM_DEVICES,), ("expert",), axis_type=jax.sharding.AxisType.Explicit
        )
        x = jax.device_put(tokens(), NamedSharding(mesh, P("expert")))
        layer = make_layer()
        self.assert_sharded(jax.jit(lambda x: layer(x))(x))

    def test_derivative_of_an_eager_call(self):
        """Its tracers hold values whose shardings tell the mesh."""
        with jax.set_mesh(MESH):
            layer = make_layer()
        grads = nnx.grad(lambda layer: layer(tokens())[0].sum())(layer)
        expected = nnx.grad(lambda layer: layer(tokens())[0].sum())(make_layer(mesh=ONE_DEVICE))
        for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)

    def test_in_shardings_with_the_argument(self):
        layer = make_layer(mesh=MESH)
        run = jax.jit(lambda x: layer(x), in_shardings=NamedSharding(MESH, P("expert")))
        self.assert_sharded(run(tokens()))

    def test_one_device_needs_no_mesh(self):
        y, _ = make_layer()(tokens())
        self.assertLen(y.sharding.device_set, 1)
        np.testing.assert_allclose(y, self.expected[0], rtol=1e-4, atol=1e-5)


@tier.only_on_cpu
class UnknownMeshTest(parameterized.TestCase):
    """Where nothing tells the mesh there is an error with the remedy, not one of XLA."""

    MESSAGE = r"no mesh is known .*Give mesh= to the layer, or call it under\s+jax.set_mesh"

    def setUp(self):
        super().setUp()
        if testing.NUM_DEVICES == 1:
            self.skipTest("one device needs no mesh")

    def test_jit(self):
        layer = make_layer()
        with self.assertRaisesRegex(errors.ArgumentError, self.MESSAGE):
            forward(nnx.split(layer), tokens())

    def test_in_shardings(self):
        """With Auto axes a tracer has no mesh."""
        layer = make_layer()
        run = jax.jit(
            lambda state, x: nnx.merge(nnx.graphdef(layer), state)(x),
            in_shardings=(None, NamedSharding(MESH, P("expert"))),
        )
        with self.assertRaisesRegex(errors.ArgumentError, self.MESSAGE):
            run(nnx.state(layer), tokens())

    def test_argument_and_context_differ(self):
        other = testing.mesh_of((testing.NUM_DEVICES,), ("data",))
        layer = make_layer(mesh=MESH)
        with jax.set_mesh(other), self.assertRaisesRegex(errors.ArgumentError, "expected one mesh"):
            layer(tokens())


if __name__ == "__main__":
    absltest.main()
