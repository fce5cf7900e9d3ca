"""Tokens are split over every mesh axis that no option names, and no rank repeats another's work."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import tier
from absl.testing import absltest, parameterized
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from nnx_layers import (
    BATCH,
    HIDDEN,
    INTERMEDIATE,
    NUM_EXPERTS,
    TOP_K,
    assert_close,
    make_layer,
    one_device,
    tokens,
)

import jax_ep
import jax_ep.linen

NUM_TOKENS = BATCH * 5
SMALL, LARGE = testing.two_axes()
LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "dp_ep": (("dp", "ep"), {"expert_axis": "ep"}),
    "fsdp": (("fsdp", "expert"), {}),
}  # the axes of a mesh, and the options
KINDS = (AxisType.Auto, AxisType.Explicit)


class CountingRouter:
    """The default router. `rows` has the tokens of a rank at each call."""

    def __init__(self) -> None:
        self.rows: set[int] = set()

    def __call__(self, logits: jax.Array, top_k: int) -> jax_ep.routing.Routing:
        self.rows.add(logits.shape[0])
        return jax_ep.routing.softmax_topk(logits, top_k)


def mesh_of(names: tuple[str, ...], kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return testing.mesh_of((SMALL, LARGE), names, axis_type=kind)


def weighted(y: jax.Array, stats: Any) -> Any:
    return 0.01 * (y**2).sum() + stats.aux_loss + 0.1 * stats.z_loss, (y, stats)


def run(apply: Callable[..., Any], params: Any, x: jax.Array) -> Any:
    """The outputs of a jitted step and its gradients."""
    loss = lambda params, x: weighted(*apply(params, x))
    grads, outputs = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, x)
    return outputs, grads


class SplitTokensTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        layer = make_layer(mesh=one_device())
        cls.params = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(layer, nnx.Param)))
        cls.expected = cls.in_nnx(cls.params, tokens(), mesh=one_device())

    @staticmethod
    def in_nnx(params: Any, x: jax.Array, **options: Any) -> Any:
        graph, state = nnx.split(make_layer(**options))

        def apply(params: Any, x: jax.Array) -> Any:
            own = jax.tree.map(lambda leaf: leaf, state)
            nnx.replace_by_pure_dict(own, params)
            return nnx.merge(graph, own)(x)

        return run(apply, params, x)

    @staticmethod
    def in_linen(params: Any, x: jax.Array, **options: Any) -> Any:
        layer = jax_ep.linen.MoE(HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K, **options)
        return run(lambda params, x: layer.apply({"params": params}, x), params, x)

    def check(self, got: Any) -> None:
        assert_close(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, self.expected))

    @parameterized.product(layout=list(LAYOUTS), kind=KINDS, flax=["nnx", "linen"])
    def test_axes_that_no_option_names(self, layout: str, kind: AxisType, flax: str):
        """Rows per rank, values, statistics, gradients, and the sharding of y."""
        names, options = LAYOUTS[layout]
        router = CountingRouter()
        with jax.set_mesh(mesh := mesh_of(names, kind)), warnings.catch_warnings():
            warnings.simplefilter("error")
            x = jax.device_put(tokens(), jax.NamedSharding(mesh, P(names)))
            apply = self.in_nnx if flax == "nnx" else self.in_linen
            got = apply(self.params, x, router=router, **options)
        self.assertEqual(router.rows, {NUM_TOKENS // testing.NUM_DEVICES})
        self.check(got)
        if kind == AxisType.Explicit:
            self.assertEqual(got[0][0].sharding.spec, P(names, None, None))

    def test_without_an_expert_axis(self):
        router = CountingRouter()
        with jax.set_mesh(mesh_of(("dp", "model"))):
            got = self.in_nnx(self.params, tokens(), router=router, expert_axis=None)
        self.assertEqual(router.rows, {NUM_TOKENS // testing.NUM_DEVICES})
        self.check(got)

    def test_tensor_axis(self):
        """Its ranks have parts of F, and the same tokens."""
        router = CountingRouter()
        with jax.set_mesh(mesh_of(("expert", "tp"))):
            got = self.in_nnx(self.params, tokens(), router=router, tensor_axis="tp")
        self.assertEqual(router.rows, {NUM_TOKENS // SMALL})
        self.check(got)

    def test_local_only(self):
        router = CountingRouter()
        with jax.set_mesh(mesh_of(("dp", "expert"))):
            got = self.in_nnx(self.params, tokens(), router=router, local_only=True)
        self.assertEqual(router.rows, {NUM_TOKENS // SMALL})
        self.check(got)

    def test_a_small_batch(self):
        """Axes for which the batch is too small split the second dimension, without padding."""
        router, batch = CountingRouter(), SMALL
        x = tokens(batch=batch * LARGE).reshape(batch, LARGE * 5, HIDDEN)
        with jax.set_mesh(mesh_of(("dp", "expert"))):
            y, _ = make_layer(router=router)(x)
        self.assertEqual(router.rows, {5})
        assert_close(np.asarray(y), np.asarray(make_layer(mesh=one_device())(x)[0]))

    def test_expert_axis_is_manual(self):
        """Inside of the user's own shard_map over it, the others still split the tokens."""
        router = CountingRouter()
        with jax.set_mesh(mesh_of(("dp", "expert"))):
            graph, state = nnx.split(make_layer(router=router))
            layer = jax.shard_map(
                lambda state, x: nnx.merge(graph, state)(x),
                in_specs=(nnx.get_partition_spec(state), P("expert")),
                out_specs=(P("expert"), P()),
                axis_names={"expert"},
            )
            got = jax.jit(layer)(state, tokens())
        self.assertEqual(router.rows, {NUM_TOKENS // testing.NUM_DEVICES})
        self.check((got, self.expected[1]))

    def test_manual_axes_that_no_option_names(self):
        """Pipeline stages have layers of their own: each has its own tokens and losses."""
        with jax.set_mesh(mesh_of(("stage", "expert"))):
            graph, state = nnx.split(make_layer())
            specs = nnx.get_partition_spec(state)

            def of_stage(state: Any, x: jax.Array) -> Any:
                y, stats = nnx.merge(graph, state)(x[0])
                return y[None], stats.aux_loss[None]

            layer = jax.shard_map(
                of_stage,
                in_specs=(specs, P("stage", "expert")),
                out_specs=(P("stage", "expert"), P("stage")),
            )
            y, losses = jax.jit(layer)(state, jnp.stack([tokens(n) for n in range(SMALL)]))
        whole = make_layer(mesh=one_device())
        for stage in range(SMALL):
            expected, stats = whole(tokens(stage))
            assert_close(np.asarray(y[stage]), np.asarray(expected))
            assert_close(np.asarray(losses[stage]), np.asarray(stats.aux_loss))


@tier.only_on_cpu
class WarningTest(parameterized.TestCase):
    """With batch_axes that leave an axis of x out, ranks do repeat work: not in silence."""

    MESSAGE = "x is sharded over mesh axis 'dp'.*Add 'dp' to batch_axes"

    @parameterized.parameters(*KINDS)
    def test_once(self, kind: AxisType):
        with jax.set_mesh(mesh := mesh_of(("dp", "ep"), kind)):
            x = jax.device_put(tokens(), jax.NamedSharding(mesh, P(("dp", "ep"))))
            sizes = {"capacity_factor": 90.0 + KINDS.index(kind)}  # no other test's layer
            layer = make_layer(batch_axes=("ep",), expert_axis="ep", **sizes)
            with self.assertWarnsRegex(UserWarning, self.MESSAGE) as caught:
                y, _ = layer(x)
            self.assertEqual(caught.filename, __file__)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                layer(x)
        assert_close(np.asarray(y), np.asarray(make_layer(mesh=one_device())(tokens())[0]))

    def test_axes_that_are_named(self):
        with jax.set_mesh(mesh := mesh_of(("expert", "tp"))), warnings.catch_warnings():
            warnings.simplefilter("error")
            x = jax.device_put(tokens(), jax.NamedSharding(mesh, P("expert", None, "tp")))
            make_layer(batch_axes=(), tensor_axis="tp")(x)


if __name__ == "__main__":
    absltest.main()
