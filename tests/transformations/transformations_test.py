"""A layer under every transformation of JAX: equal to the dense layer without one, gradients included."""

from __future__ import annotations

import functools

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import tier
from absl.testing import absltest, parameterized
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_ep

MESH = testing.expert_mesh()
NUM_STEPS = 3


def mapped(f, **kwargs):
    """shard_map without jit."""
    return jax.shard_map(f, mesh=MESH, in_specs=P("expert"), out_specs=P("expert"), **kwargs)


def stacked_arguments():
    """As `layer_arguments`, with matrices of NUM_STEPS layers, [E, NUM_STEPS, H, H]: the rank axis is first."""
    ids, x, weights, _ = testing.layer_arguments()
    layers = [testing.layer_arguments(seed=step)[3] for step in range(NUM_STEPS)]
    return ids, x, weights, np.stack(layers, 1)


def dense_steps(ids, x, weights, matrices):
    for step in range(matrices.shape[1]):
        x = x + testing.dense_layer(ids, x, weights, matrices[:, step])
    return x


class JitTest(parameterized.TestCase):
    @parameterized.parameters(True, False)
    def test_gradients(self, check_vma):
        testing.assert_same_layer(
            mapped(testing.expert_layer, check_vma=check_vma), testing.layer_arguments()
        )

    @parameterized.parameters(True, False)
    @tier.fully_optimized
    def test_eager_shard_map_gives_the_same_bits(self, check_vma):
        f = mapped(testing.expert_layer, check_vma=check_vma)
        arguments = testing.layer_arguments()
        testing.assert_bitwise(f(*arguments), jax.jit(f)(*arguments))

    def test_one_compilation_for_all_routes(self):
        f = jax.jit(mapped(testing.expert_layer))
        for seed in range(4):
            arguments = testing.layer_arguments(seed=seed)
            testing.assert_close(f(*arguments), testing.dense_layer(*arguments), steps=64)
        self.assertEqual(f._cache_size(), 1)

    def test_two_dispatches_in_a_row_and_an_unused_one(self):
        """No order of calls is needed: two plans alive at once, and one whose combine never comes."""

        def f(ids, x, weights, matrices):
            num_experts = matrices.shape[0] * lax.axis_size("expert")
            dispatch = functools.partial(
                jax_ep.dispatch, num_experts=num_experts, axis_name="expert"
            )
            first = dispatch(x, ids, weights)
            second = dispatch(2 * x, ids[:, ::-1], None)
            dispatch(3 * x, ids, weights)
            outs = [jax_ep.combine(d.rows, d.plan, d.row_weights) for d in (second, first)]
            return outs[0] + outs[1]

        ids, x, weights, _ = arguments = testing.layer_arguments()
        expected = ((weights + 2) * (ids >= 0)).sum(1, keepdims=True) * x
        testing.assert_close(jax.jit(mapped(f))(*arguments), expected)


class LoopTest(parameterized.TestCase):
    @parameterized.product(kind=["scan", "fori_loop"], check_vma=[True, False])
    def test_gradients(self, kind, check_vma):
        def f(ids, x, weights, matrices):
            matrices = jnp.moveaxis(matrices, 1, 0)

            def step(x, matrices):
                return x + testing.expert_layer(ids, x, weights, matrices), None

            if kind == "scan":
                return lax.scan(step, x, matrices)[0]
            body = lambda i, x: step(x, lax.dynamic_index_in_dim(matrices, i, keepdims=False))[0]
            return lax.fori_loop(0, NUM_STEPS, body, x)

        testing.assert_same_layer(mapped(f, check_vma=check_vma), stacked_arguments(), dense_steps)

    def test_scan_over_routes(self):
        """One call site, new routes in every iteration."""

        def f(ids, x, weights, matrices):
            def step(shift, _):
                return shift + 1, testing.expert_layer(
                    jnp.roll(ids, shift, 0), x, weights, matrices
                )

            return lax.scan(step, 0, length=NUM_STEPS)[1].sum(0)

        def dense(ids, x, weights, matrices):
            ids = ids.reshape(testing.NUM_DEVICES, -1, ids.shape[1])
            outs = [
                testing.dense_layer(
                    jnp.roll(ids, shift, 1).reshape(-1, ids.shape[2]), x, weights, matrices
                )
                for shift in range(NUM_STEPS)
            ]
            return sum(outs)

        testing.assert_same_layer(mapped(f), testing.layer_arguments(), dense)

    def test_while_loop(self):
        """The number of iterations depends on data that all ranks share."""

        def f(ids, x, weights, matrices):
            matrices = jnp.moveaxis(matrices, 1, 0)

            def body(carry):
                step, x, _ = carry
                of_step = lax.dynamic_index_in_dim(matrices, step, keepdims=False)
                x = x + testing.expert_layer(ids, x, weights, of_step)
                return step + 1, x, lax.pmax(jnp.abs(x).max(), "expert")

            running = lambda carry: (carry[0] < NUM_STEPS) & (carry[2] > 0)
            return lax.while_loop(running, body, (0, x, lax.pmax(jnp.abs(x).max(), "expert")))[1]

        arguments = stacked_arguments()
        testing.assert_close(jax.jit(mapped(f))(*arguments), dense_steps(*arguments), steps=64)


class CondTest(parameterized.TestCase):
    @parameterized.parameters(True, False)
    def test_gradients(self, predicate):
        def f(ids, x, weights, matrices):
            num_ids = (
                lax.psum(ids.size, "expert") + lax.psum(ids.max(), "expert") * 0
            )  # not a constant
            return lax.cond(
                (num_ids > 0) == predicate,
                lambda: testing.expert_layer(ids, x, weights, matrices),
                lambda: 2 * x,
            )

        dense = testing.dense_layer if predicate else lambda ids, x, weights, matrices: 2 * x
        testing.assert_same_layer(mapped(f), testing.layer_arguments(), dense)


class RematTest(parameterized.TestCase):
    POLICIES = {
        "nothing": None,
        "plan": jax.checkpoint_policies.save_only_these_names(jax_ep.REMAT_NAMES[0]),
        "all": jax.checkpoint_policies.save_only_these_names(*jax_ep.REMAT_NAMES),
        "everything": jax.checkpoint_policies.everything_saveable,
    }

    @parameterized.parameters(
        ("nothing", False),
        ("plan", False),
        ("all", False),
        ("everything", True),
        ("all", True),
        ("plan", True),
    )
    def test_gradients(self, policy, in_scan):
        if not in_scan:
            f = jax.checkpoint(testing.expert_layer, policy=self.POLICIES[policy])
            testing.assert_same_layer(mapped(f), testing.layer_arguments())
            return

        def f(ids, x, weights, matrices):
            @functools.partial(jax.checkpoint, policy=self.POLICIES[policy])
            def step(x, matrices):
                return x + testing.expert_layer(ids, x, weights, matrices), None

            return lax.scan(step, x, jnp.moveaxis(matrices, 1, 0))[0]

        testing.assert_same_layer(mapped(f), stacked_arguments(), dense_steps)

    def test_the_names_are_names_in_the_program(self):
        program = str(jax.make_jaxpr(mapped(testing.expert_layer))(*testing.layer_arguments()))
        # The layer here has a matmul without an activation.
        for name in set(jax_ep.REMAT_NAMES) - {"jax_ep.pre_activation"}:
            self.assertIn(f"name={name}", program)


class VmapTest(parameterized.TestCase):
    """Two pipeline stages at once: equal to a loop over the stages, bit by bit, gradients included."""

    def arguments(self):
        stages = [testing.layer_arguments(seed=stage) for stage in range(2)]
        return [np.stack(pair) for pair in zip(*stages, strict=True)]

    @parameterized.parameters((0, 0, 0, 0), (None, 0, 0, 0), (0, 0, 0, None), (None, None, None, 0))
    @tier.fully_optimized
    def test_of_shard_map_is_a_loop(self, *axes):
        arguments = [a if i == 0 else a[0] for a, i in zip(self.arguments(), axes, strict=True)]
        stage = mapped(testing.expert_layer)
        vmapped = jax.vmap(stage, axes)
        got = testing.value_and_gradients(vmapped, *arguments)

        def loop(*arguments):
            pick = lambda s: [a[s] if i == 0 else a for a, i in zip(arguments, axes, strict=True)]
            return jnp.stack([stage(*pick(s)) for s in range(2)])

        expected = testing.value_and_gradients(loop, *arguments)
        testing.assert_bitwise(got[0], expected[0])
        for a, b in zip(got[1:], expected[1:], strict=True):
            testing.assert_close(a, b, steps=16)

    @parameterized.parameters(True, False)
    def test_inside_shard_map(self, check_vma):
        """The stages are a local dimension behind the ranks': [T, 2, ...]."""
        arguments = [np.moveaxis(a, 0, 1) for a in self.arguments()]
        f = jax.vmap(testing.expert_layer, in_axes=1, out_axes=1)
        dense = jax.vmap(testing.dense_layer, in_axes=1, out_axes=1)
        testing.assert_same_layer(mapped(f, check_vma=check_vma), arguments, dense)

    def test_of_remat_in_scan(self):
        arguments = [np.stack([a, a[::-1]]) for a in stacked_arguments()]
        arguments[0] = np.stack([stacked_arguments()[0]] * 2)

        def f(ids, x, weights, matrices):
            @jax.checkpoint
            def step(x, matrices):
                return x + testing.expert_layer(ids, x, weights, matrices), None

            return lax.scan(step, x, jnp.moveaxis(matrices, 1, 0))[0]

        testing.assert_same_layer(jax.vmap(mapped(f)), arguments, jax.vmap(dense_steps))


if __name__ == "__main__":
    absltest.main()
