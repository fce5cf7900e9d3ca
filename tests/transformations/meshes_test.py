"""Meshes: which axis is the expert axis, of which kind, beside which others, over which devices."""

from __future__ import annotations

import functools

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

SMALL, LARGE = testing.two_axes()


def layer_on(mesh, tokens=P("expert"), experts=P("expert"), axis_name="expert", **kwargs):
    """expert_layer under shard_map: ids, x and weights split by `tokens`, matrices by `experts`."""
    return jax.shard_map(
        functools.partial(testing.expert_layer, axis_name=axis_name),
        mesh=mesh,
        in_specs=(tokens, tokens, tokens, experts),
        out_specs=tokens,
        **kwargs,
    )


class OneAxisTest(parameterized.TestCase):
    @parameterized.parameters((count,) for count in testing.rank_counts(1, 2, 3, 5, 7))
    def test_some_of_the_devices(self, num_ranks):
        arguments = testing.layer_arguments(4 * num_ranks, 2 * num_ranks)
        testing.assert_same_layer(layer_on(testing.expert_mesh(num_ranks)), arguments)

    @parameterized.parameters((AxisType.Auto,), (AxisType.Explicit,))
    def test_kinds_of_axes(self, axis_type):
        mesh = testing.mesh_of((testing.NUM_DEVICES,), ("expert",), axis_type=axis_type)
        sharding = NamedSharding(mesh, P("expert"))
        arguments = [jax.device_put(a, sharding) for a in testing.layer_arguments()]
        with jax.set_mesh(mesh):
            got = testing.value_and_gradients(layer_on(mesh), *arguments)
        expected = testing.value_and_gradients(testing.dense_layer, *testing.layer_arguments())
        for a, b in zip(got, expected, strict=True):
            testing.assert_close(a, b, steps=128)

    def test_mesh_from_context_and_specs_from_arguments(self):
        """As a user writes it: make_mesh (Explicit axes), set_mesh, and shard_map without in_specs."""
        arguments = testing.layer_arguments()
        with jax.set_mesh(jax.make_mesh((testing.NUM_DEVICES,), ("expert",))):
            placed = [jax.device_put(a, P("expert")) for a in arguments]
            out = jax.jit(jax.shard_map(testing.expert_layer, out_specs=P("expert")))(*placed)
        testing.assert_close(out, testing.dense_layer(*arguments), steps=64)

    def test_same_devices_in_another_order(self):
        """Two programs over the same devices, with ranks permuted, called alternately."""
        devices = jax.devices()[: testing.NUM_DEVICES]
        orders = [devices, devices[::-1], devices[1:] + devices[:1]]
        layers = [
            jax.jit(layer_on(testing.mesh_of((len(devices),), ("expert",), devices=o)))
            for o in orders
        ]
        for call in range(12):
            arguments = testing.layer_arguments(seed=call)
            out = layers[call % 3](*arguments)
            testing.assert_close(out, testing.dense_layer(*arguments), f"call {call}", steps=64)

    def test_both_orders_in_one_process_have_their_own_plan(self):
        devices = jax.devices()[: testing.NUM_DEVICES]
        sizes = testing.Sizes(testing.NUM_DEVICES)
        ids = testing.routings(sizes)["uniform"]
        x = np.ones((*ids.shape[:2], 8), np.float32)
        for order in devices, devices[::-1]:
            mesh = testing.mesh_of((len(devices),), ("expert",), devices=order)
            f = testing.sharded(lambda x, ids: sizes.dispatch(x, ids, None).plan, mesh)
            testing.assert_plan(f(*testing.merge_ranks((x, ids))), sizes.plans(ids))


class TwoAxesTest(parameterized.TestCase):
    @parameterized.product(names=[("data", "expert"), ("expert", "data")], check_vma=[True, False])
    def test_groups(self, names, check_vma):
        """Every index of "data" is a group of its own; experts are the same in all groups."""
        mesh = testing.mesh_of((SMALL, LARGE), names)
        f = layer_on(mesh, P(("data", "expert")), check_vma=check_vma)
        testing.assert_same_layer(f, testing.layer_arguments())

    @parameterized.parameters(("data", "expert"), ("expert", "data"))
    def test_every_group_has_the_same_tokens(self, *names):
        mesh = testing.mesh_of((SMALL, LARGE), names)
        testing.assert_same_layer(layer_on(mesh), testing.layer_arguments())

    @parameterized.parameters(("data", "expert"), ("expert", "data"))
    def test_plans_of_groups(self, *names):
        mesh = testing.mesh_of((SMALL, LARGE), names)
        num_ranks = mesh.shape["expert"]
        sizes = testing.Sizes(num_ranks, num_local=2, num_tokens=4, top_k=2)
        groups = [testing.routings(sizes, seed=g)["uniform"] for g in range(mesh.shape["data"])]
        f = testing.sharded(
            lambda ids: sizes.dispatch(jnp.ones((4, 8)), ids, None).plan, mesh, ("data", "expert")
        )
        plan = f(np.concatenate([testing.merge_ranks(ids) for ids in groups]))
        expected = [plan for ids in groups for plan in sizes.plans(ids)]
        testing.assert_plan(plan, expected)

    @parameterized.product(axis_name=[("a", "b"), ("b", "a")], check_vma=[True, False])
    def test_expert_axis_of_two_axes(self, axis_name, check_vma):
        mesh = testing.mesh_of((SMALL, LARGE), ("a", "b"))
        split = P(axis_name)
        f = layer_on(mesh, split, split, axis_name, check_vma=check_vma)
        testing.assert_same_layer(f, testing.layer_arguments())

    @parameterized.parameters(("a", "b"), ("b", "a"))
    def test_ranks_of_two_axes(self, *axis_name):
        """The rank is lax.axis_index(axis_name), and so the position in P(axis_name)."""
        mesh = testing.mesh_of((SMALL, LARGE), ("a", "b"))
        sizes = testing.Sizes(testing.NUM_DEVICES)
        ids = testing.routings(sizes)["uniform"]

        def f(ids):
            plan = sizes.dispatch(jnp.ones((6, 8)), ids, None, axis_name=axis_name).plan
            return plan, lax.axis_index(axis_name)[None]

        plan, rank = testing.sharded(f, mesh, axis_name)(testing.merge_ranks(ids))
        np.testing.assert_array_equal(rank, np.arange(testing.NUM_DEVICES))
        testing.assert_plan(plan, sizes.plans(ids))
        self.assertEqual(plan.axis_name, axis_name)

    def test_two_axes_of_three(self):
        """The expert axis is ("c", "a") of a mesh ("a", "b", "c"): groups are strided."""
        halves = [2 if testing.NUM_DEVICES % 2**n == 0 else 1 for n in (1, 2, 3)]
        shape = (halves[0], halves[1], testing.NUM_DEVICES // halves[0] // halves[1])
        mesh = testing.mesh_of(shape, ("a", "b", "c"))
        f = layer_on(mesh, P(("b", "c", "a")), P(("c", "a")), ("c", "a"))
        testing.assert_same_layer(f, testing.layer_arguments())

    def test_one_axis_twice_over(self):
        """Two layers in one program, each with another expert axis."""
        mesh = testing.mesh_of((SMALL, LARGE), ("a", "b"))
        both = P(("a", "b"))

        def f(ids, x, weights, matrices):
            one = layer_on(mesh, both, P("a"), "a")
            two = layer_on(mesh, both, P("b"), "b")
            return two(ids, one(ids, x, weights, matrices), weights, matrices)

        def dense(ids, x, weights, matrices):
            return testing.dense_layer(
                ids, testing.dense_layer(ids, x, weights, matrices), weights, matrices
            )

        testing.assert_same_layer(f, testing.layer_arguments(), dense)


class PartialManualTest(parameterized.TestCase):
    """shard_map over "expert" only; "data" stays with the compiler."""

    @parameterized.product(data=[AxisType.Auto, AxisType.Explicit], check_vma=[True, False])
    def test_replicated_over_the_other_axis(self, data, check_vma):
        mesh = jax.sharding.Mesh(
            np.array(jax.devices()[: testing.NUM_DEVICES]).reshape(SMALL, LARGE),
            ("data", "expert"),
            axis_types=(data, AxisType.Auto),
        )
        arguments = testing.layer_arguments()
        with jax.set_mesh(mesh):
            placed = [jax.device_put(a, NamedSharding(mesh, P("expert"))) for a in arguments]
            f = layer_on(mesh, axis_names={"expert"}, check_vma=check_vma)
            got = testing.value_and_gradients(f, *placed)
        expected = testing.value_and_gradients(testing.dense_layer, *arguments)
        for a, b in zip(got, expected, strict=True):
            testing.assert_close(a, b, steps=128)

    def test_sharded_by_the_compiler_is_gathered(self):
        """Auto axes: operands that the compiler has split over "data" are gathered first."""
        mesh = testing.mesh_of((SMALL, LARGE), ("data", "expert"))
        arguments = testing.layer_arguments()
        placed = [jax.device_put(a, NamedSharding(mesh, P("expert"))) for a in arguments]
        placed[1] = jax.device_put(arguments[1], NamedSharding(mesh, P("expert", "data")))
        out = jax.jit(layer_on(mesh, axis_names={"expert"}))(*placed)
        testing.assert_close(out, testing.dense_layer(*arguments), steps=64)

    def test_moe_mlp_counts_the_experts_itself(self):
        mesh = testing.mesh_of((SMALL, LARGE), ("data", "expert"))
        ids, x, weights, _ = testing.layer_arguments()
        w_up, w_down = np.ones((2, 2 * LARGE, x.shape[1], x.shape[1]), np.float32)
        ids = np.minimum(ids, 2 * LARGE - 1)
        layer = functools.partial(jax_ep.moe_mlp, activation="relu", axis_name="expert")
        run = jax.shard_map(
            lambda *arguments: layer(*arguments)[0],
            mesh=mesh,
            in_specs=P("expert"),
            out_specs=P("expert"),
            axis_names={"expert"},
        )
        y = jax.jit(run)(x, ids, weights, w_up, w_down)
        hidden = np.maximum(x.sum(1), 0) * x.shape[1]
        expected = np.where(ids >= 0, weights, 0).sum(1) * hidden
        np.testing.assert_allclose(y, np.broadcast_to(expected[:, None], y.shape), rtol=1e-4)

    def test_sharded_over_an_explicit_axis_is_an_error(self):
        if SMALL == 1 and testing.NUM_DEVICES == 1:
            mesh = testing.mesh_of((1, 1), ("data", "expert"), axis_type=AxisType.Explicit)
        else:
            shape = (SMALL, LARGE) if SMALL > 1 else (LARGE, SMALL)
            mesh = testing.mesh_of(shape, ("data", "expert"), axis_type=AxisType.Explicit)
        ids, x, weights, matrices = testing.layer_arguments()
        with jax.set_mesh(mesh):
            placed = [jax.device_put(a, P("expert")) for a in (ids, x, weights, matrices)]
            placed[1] = jax.device_put(x, P("expert", "data"))
            f = jax.shard_map(
                testing.expert_layer,
                in_specs=P("expert"),
                out_specs=P("expert"),
                axis_names={"expert"},
            )
            with self.assertRaisesRegex(ValueError, "Explicit mesh axis 'data'") as caught:
                jax.jit(f)(*placed)
            self.assertIsInstance(caught.exception, jax_ep.Error)


class ReplicatedTest(parameterized.TestCase):
    """Inputs that do not vary over the expert axis are cast, and their gradients summed over it."""

    @parameterized.parameters("x", "ids", "weights", "matrices", "all")
    def test_gradients(self, which):
        names = ("ids", "x", "weights", "matrices")
        arguments = list(testing.layer_arguments())
        tokens_in_a_rank = arguments[0].shape[0] // testing.NUM_DEVICES
        in_specs = []
        for index, name in enumerate(names):
            replicated = which in (name, "all")
            in_specs.append(P() if replicated else P("expert"))
            if replicated:  # one rank's worth, the same on every rank
                count = 2 if name == "matrices" else tokens_in_a_rank
                arguments[index] = arguments[index][:count]
        f = jax.shard_map(
            testing.expert_layer,
            mesh=testing.expert_mesh(),
            in_specs=tuple(in_specs),
            out_specs=P("expert"),
        )

        def dense(*arguments):
            counts = (testing.NUM_DEVICES if spec == P() else 1 for spec in in_specs)
            arguments = [
                jnp.concatenate([jnp.asarray(a)] * n)
                for a, n in zip(arguments, counts, strict=True)
            ]
            return testing.dense_layer(*arguments)

        testing.assert_same_layer(f, arguments, dense)

    def test_results_vary_over_the_expert_axis(self):
        """Everything replicated, and still the rows differ by rank: their type must say so."""

        def f(x, ids):
            dispatched = jax_ep.dispatch(
                x, ids, None, num_experts=testing.NUM_DEVICES, axis_name="expert"
            )
            for leaf in jax.tree.leaves(dispatched):
                self.assertEqual(jax.typeof(leaf).mat.varying, {"expert"})
            return dispatched.rows

        f = jax.shard_map(f, mesh=testing.expert_mesh(), in_specs=P(), out_specs=P("expert"))
        rows = jax.jit(f)(np.ones((2, 8), np.float32), np.zeros((2, 1), np.int32))
        expected = np.zeros((testing.NUM_DEVICES, rows.shape[0] // testing.NUM_DEVICES, 8))
        expected[0] = 1
        testing.assert_bitwise(rows, testing.merge_ranks(expected.astype(np.float32)))

    def test_an_output_that_varies_cannot_be_returned_as_replicated(self):
        f = jax.shard_map(
            testing.expert_layer, mesh=testing.expert_mesh(), in_specs=P(), out_specs=P()
        )
        with self.assertRaisesRegex(ValueError, "varying|replicat"):
            jax.jit(f)(*testing.layer_arguments())


if __name__ == "__main__":
    absltest.main()
