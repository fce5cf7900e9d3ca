"""The CUDA handlers' checks, run on CPU: the instantiate stage needs no GPU.

XLA:CPU runs a handler that is registered for it in the same stages (without prepare and
initialize), and shows it the same attributes. So what a handler refuses can be seen here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from jax_ep import _ffi

GROUP = {"replica_groups": np.arange(4), "group_size": np.int64(4)}
TRANSFER = GROUP | {
    "num_experts": np.int64(8),
    "row_align": np.int64(1),
    "zero_tail": np.bool_(True),
    "num_sms": np.int64(0),
    "has_weights": np.bool_(False),
}
MATMUL = {
    "transpose_rhs": np.bool_(False),
    "zero_tail": np.bool_(True),
    "num_sms": np.int64(0),
}
RHS_GRADIENT = {
    "transpose_rhs": np.bool_(False),
    "has_accumulator": np.bool_(False),
    "num_sms": np.int64(0),
}


@functools.cache
def register():
    jax.devices("cpu")  # before it starts, types would be registered after their handlers
    for name, capsules in _ffi.type_registrations().items():
        jax.ffi.register_ffi_type(name, capsules, platform="cpu")
    for name, handlers in _ffi.registrations().items():
        stages = {stage: handlers[stage] for stage in ("instantiate", "execute")}
        jax.ffi.register_ffi_target(name, stages, platform="cpu")


def plan(tokens=16, top_k=3, rows=40, experts=2):
    s32 = functools.partial(jnp.zeros, dtype=jnp.int32)
    return [
        *(s32(n) for n in (experts, experts, experts + 1)),
        s32((rows, 3)),
        s32(rows),
        jnp.zeros((tokens, top_k), bool),
        s32((tokens, top_k)),
        *[s32(1)] * 4,
    ]


def struct(arrays):
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]


def call(target, operands, results, attributes):
    return jax.jit(lambda *a: jax.ffi.ffi_call(target, struct(results))(*a, **attributes))(
        *operands
    )


CEILING = {k: TRANSFER[k] for k in ("replica_groups", "group_size", "num_sms")} | {
    "repeats": np.int64(2)
}

X, IDS, ROWS = (
    jnp.zeros((16, 64), jnp.bfloat16),
    jnp.zeros((16, 3), jnp.int32),
    jnp.zeros((40, 64), jnp.bfloat16),
)
CALLS = {
    "jax_ep.dispatch.v1": ([X, IDS], [ROWS, *plan()], TRANSFER),
    "jax_ep.redispatch.v1": ([X, *plan()], [ROWS], TRANSFER),
    "jax_ep.combine.v1": ([ROWS, *plan()], [X], TRANSFER | {"has_scalars": np.bool_(False)}),
    "jax_ep.dispatch_start.v1": ([X, IDS], [ROWS, *plan()], TRANSFER),
    "jax_ep.redispatch_start.v1": ([X, *plan()], [ROWS], TRANSFER),
    "jax_ep.combine_start.v1": (
        [ROWS, *plan()],
        [X],
        TRANSFER | {"has_scalars": np.bool_(False)},
    ),
    "jax_ep.transfer_done.v1": ([ROWS, *plan(), X, IDS], [ROWS], {"num_results": np.int64(1)}),
    "jax_ep.bulk_copy_ceiling.v1": ([X], [jnp.zeros(1, jnp.int32)], CEILING),
    "jax_ep.grouped_matmul.v1": (
        [ROWS, jnp.zeros((2, 64, 32)), jnp.zeros(2, jnp.int32)],
        [jnp.zeros((40, 32))],
        MATMUL,
    ),
    "jax_ep.grouped_matmul_rhs_gradient.v1": (
        [ROWS, jnp.zeros((40, 32), jnp.bfloat16), jnp.zeros(2, jnp.int32)],
        [jnp.zeros((2, 64, 32))],
        RHS_GRADIENT,
    ),
    "jax_ep.grouped_matmul_quantized.v1": (
        [
            *(jnp.zeros((40, 144), jnp.float8_e4m3fn), jnp.zeros((40, 2))),
            *(jnp.zeros((2, 136, 144), jnp.float8_e4m3fn), jnp.zeros((2, 2, 2))),
            jnp.zeros(2, jnp.int32),
        ],
        [jnp.zeros((40, 136), jnp.bfloat16)],
        {"scale_block": np.int64(128), "zero_tail": np.bool_(True), "num_sms": np.int64(0)},
    ),
    "jax_ep.grouped_matmul_mxfp4.v1": (
        [
            *(ROWS, jnp.zeros((2, 136, 64), jnp.float4_e2m1fn)),
            *(jnp.ones((2, 136, 2), jnp.float8_e8m0fnu), jnp.zeros(2, jnp.int32)),
        ],
        [jnp.zeros((40, 136), jnp.bfloat16)],
        {"zero_tail": np.bool_(True), "num_sms": np.int64(0)},
    ),
    "jax_ep.grouped_matmul_mxfp4_lhs_gradient.v1": (
        [
            *(ROWS, jnp.zeros((2, 64, 160), jnp.float4_e2m1fn)),
            *(jnp.ones((2, 64, 5), jnp.float8_e8m0fnu), jnp.zeros(2, jnp.int32)),
        ],
        [jnp.zeros((40, 160), jnp.bfloat16)],
        {"zero_tail": np.bool_(True), "num_sms": np.int64(0)},
    ),
    "jax_ep.grouped_matmul_mxfp4_activation.v1": (
        [
            *(ROWS, jnp.zeros((2, 32, 64), jnp.float4_e2m1fn)),
            *(jnp.ones((2, 32, 2), jnp.float8_e8m0fnu), jnp.zeros(2, jnp.int32)),
            *(jnp.zeros((2, 32)), jnp.zeros(40)),
        ],
        [jnp.zeros((40, 16), jnp.bfloat16), jnp.zeros((40, 32), jnp.bfloat16)],
        {
            "activation": "swiglu",
            "limit": np.float32(7),
            "alpha": np.float32(1.702),
            "has_bias": np.bool_(True),
            "has_row_weights": np.bool_(True),
            "keep_pre_activation": np.bool_(True),
            "num_sms": np.int64(0),
        },
    ),
    "jax_ep.grouped_matmul_quantized_activation.v1": (
        [
            *(jnp.zeros((40, 144), jnp.float8_e4m3fn), jnp.zeros((40, 2))),
            *(jnp.zeros((2, 256, 144), jnp.float8_e4m3fn), jnp.zeros((2, 2, 2))),
            *(jnp.zeros(2, jnp.int32), jnp.zeros(40)),
        ],
        [
            *(jnp.zeros((40, 128), jnp.float8_e4m3fn), jnp.zeros((40, 1))),
            jnp.zeros((40, 256), jnp.bfloat16),
        ],
        {
            "activation": "swiglu",
            "has_row_weights": np.bool_(True),
            "keep_pre_activation": np.bool_(True),
            "power_of_two_scales": np.bool_(False),
            "num_sms": np.int64(0),
        },
    ),
    "jax_ep.quantize.v1": (
        [jnp.zeros((2, 20, 144), jnp.bfloat16)],
        [jnp.zeros((2, 20, 144), jnp.float8_e4m3fn), jnp.zeros((2, 20, 2))],
        {
            "scale_block": np.int64(128),
            "is_e5m2": np.bool_(False),
            "min_amax": np.float32(1e-4),
            "power_of_two_scales": np.bool_(True),
        },
    ),
    "jax_ep.quantize_weights.v1": (
        [jnp.zeros((2, 20, 128), jnp.bfloat16), jnp.zeros((2, 20, 16), jnp.bfloat16)],
        [
            *(jnp.zeros((2, 20, 144), jnp.float8_e4m3fn), jnp.zeros((2, 1, 2))),
            *(jnp.zeros((2, 144, 20), jnp.float8_e4m3fn), jnp.zeros((2, 2, 1))),
        ],
        {
            "as_given": np.bool_(True),
            "transposed": np.bool_(True),
            "min_amax": np.float32(1e-4),
            "power_of_two_scales": np.bool_(False),
        },
    ),
    "jax_ep.quantize_transposed.v1": (
        [
            *(jnp.zeros((300, 144), jnp.float8_e4m3fn), jnp.zeros((300, 2))),
            *(jnp.zeros(4, jnp.int32), jnp.zeros(4, jnp.int32)),
        ],
        [jnp.zeros((4, 144, 128), jnp.float8_e4m3fn), jnp.zeros((4, 144))],
        {
            "is_quantized": np.bool_(True),
            "per_column": np.bool_(True),
            "zero_tail": np.bool_(False),
            "min_amax": np.float32(1e-4),
            "power_of_two_scales": np.bool_(False),
        },
    ),
    "jax_ep.quantize_both.v1": (
        [
            jnp.zeros((300, 144), jnp.bfloat16),
            *(jnp.zeros(4, jnp.int32), jnp.zeros(4, jnp.int32)),
        ],
        [
            *(jnp.zeros((300, 144), jnp.float8_e4m3fn), jnp.zeros((300, 2))),
            *(jnp.zeros((4, 144, 128), jnp.float8_e4m3fn), jnp.zeros((4, 2))),
        ],
        {
            "per_column": np.bool_(False),
            "min_amax": np.float32(1e-4),
            "power_of_two_scales": np.bool_(False),
        },
    ),
    "jax_ep.quantize_activation_gradient.v1": (
        [
            *(jnp.zeros((300, 128), jnp.bfloat16), jnp.zeros((300, 256), jnp.bfloat16)),
            *(jnp.zeros(4, jnp.int32), jnp.zeros(4, jnp.int32), jnp.zeros(300)),
        ],
        [
            *(jnp.zeros((300, 256), jnp.float8_e4m3fn), jnp.zeros((300, 2))),
            *(jnp.zeros((4, 256, 128), jnp.float8_e4m3fn), jnp.zeros((4, 2))),
            *(jnp.zeros((4, 128, 128), jnp.float8_e4m3fn), jnp.zeros((4, 128))),
            jnp.zeros((300, 1)),
        ],
        {
            "activation": "swiglu",
            "has_row_weights": np.bool_(True),
            "min_amax": np.float32(1e-30),
            "power_of_two_scales": np.bool_(False),
            "activation_min_amax": np.float32(1e-4),
            "activation_power_of_two_scales": np.bool_(False),
        },
    ),
    "jax_ep.grouped_matmul_quantized_rhs_gradient.v1": (
        [
            *(jnp.zeros((4, 144, 128), jnp.float8_e4m3fn), jnp.zeros((4, 144))),
            *(jnp.zeros((4, 136, 128), jnp.float8_e4m3fn), jnp.zeros((4, 2))),
            jnp.zeros(2, jnp.int32),
        ],
        [jnp.zeros((2, 144, 136), jnp.bfloat16)],
        {"has_accumulator": np.bool_(False), "num_sms": np.int64(0)},
    ),
    "jax_ep.grouped_matmul_activation.v1": (
        [ROWS, jnp.zeros((2, 64, 32)), jnp.zeros(2, jnp.int32), jnp.zeros((2, 32)), jnp.zeros(40)],
        [jnp.zeros((40, 16), jnp.bfloat16), jnp.zeros((40, 32), jnp.bfloat16)],
        {
            "activation": "swiglu",
            "has_bias": np.bool_(True),
            "has_row_weights": np.bool_(True),
            "keep_pre_activation": np.bool_(True),
            "num_sms": np.int64(0),
        },
    ),
    "jax_ep.grouped_matmul_activation_gradient.v1": (
        [
            *(ROWS, jnp.zeros((2, 16, 64)), jnp.zeros(2, jnp.int32)),
            *(jnp.zeros((40, 32), jnp.bfloat16), jnp.zeros(40)),
        ],
        [
            jnp.zeros((40, 32), jnp.bfloat16),
            jnp.zeros((40, 16), jnp.bfloat16),
            jnp.zeros((40, 1)),
        ],
        {
            "activation": "swiglu",
            "has_row_weights": np.bool_(True),
            "num_sms": np.int64(0),
        },
    ),
}


class HandlersTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        if not _ffi.build_info()["cuda"]:
            self.skipTest("no CUDA handlers in this build; `JAX_EP_CUDA=ON make test` has them")
        register()

    def test_every_target_is_tried_here(self):
        self.assertEqual(set(CALLS), set(_ffi.registrations()))

    @parameterized.parameters(*CALLS)
    def test_a_good_call_gets_as_far_as_the_driver(self, target):
        if not _ffi.driver_problem():
            self.skipTest("with a driver, a good call would be launched on memory of the host")
        with self.assertRaisesRegex(Exception, "no NVIDIA driver"):
            call(target, *CALLS[target])

    @parameterized.parameters(*(target for target in CALLS if "replica_groups" in CALLS[target][2]))
    def test_a_transfer_may_have_a_lane(self, target):
        if not _ffi.driver_problem():
            self.skipTest("with a driver, a good call would be launched on memory of the host")
        operands, results, attributes = CALLS[target]
        lane = {"lane": np.int64(1), "num_lanes": np.int64(2)}
        with self.assertRaisesRegex(Exception, "no NVIDIA driver"):
            call(target, operands, results, attributes | lane)

    @parameterized.parameters(
        ({"group_size": np.int64(0)}, "group_size is 0"),
        ({"group_size": np.int64(3)}, "has 4 ids; expected a positive multiple of group_size"),
        ({"replica_groups": np.array([0, 1, 2, 2])}, "the id 2 twice"),
        ({"replica_groups": np.array([0, 1, 2, -3])}, "the id -3"),
        ({"replica_groups": np.array([0, 1, 2, 4])}, "every device of the mesh"),
        ({"num_experts": np.int64(9)}, "num_experts is 9"),
        ({"row_align": np.int64(0)}, "row_align is 0"),
        ({"num_sms": np.int64(-1)}, "num_sms is -1"),
        ({"num_sms": np.int32(0)}, "attribute num_sms cannot be read"),
        ({"surprise": np.int64(1)}, "there are 8 attributes; expected 7"),
        ({"lane": np.int64(1)}, "lane is 1; expected 0 to 0"),
        ({"lane": np.int64(2), "num_lanes": np.int64(2)}, "lane is 2; expected 0 to 1"),
        ({"lane": np.int64(0), "num_lanes": np.int64(9)}, "num_lanes is 9"),
        ({"lane": np.int32(0)}, "attribute lane cannot be read"),
    )
    def test_bad_attributes(self, change, message):
        for target in ("jax_ep.dispatch.v1", "jax_ep.redispatch.v1"):
            operands, results, attributes = CALLS[target]
            with self.assertRaisesRegex(Exception, f"{target}: .*{message}") as caught:
                call(target, operands, results, attributes | change)
            print(caught.exception)

    def test_done_has_results(self):
        target = "jax_ep.transfer_done.v1"
        operands, results, _ = CALLS[target]
        with self.assertRaisesRegex(Exception, f"{target}: num_results is 0"):
            call(target, operands, results, {"num_results": np.int64(0)})

    def test_has_accumulator_is_an_attribute_of_the_rhs_gradient(self):
        target = "jax_ep.grouped_matmul_rhs_gradient.v1"
        operands, results, attributes = CALLS[target]
        for change, message in (
            ({"has_accumulator": np.int64(1)}, "attribute has_accumulator cannot be read"),
            ({"zero_tail": np.bool_(True)}, "there are 4 attributes; expected 3"),
        ):
            with self.assertRaisesRegex(Exception, f"{target}: .*{message}"):
                call(target, operands, results, attributes | change)


if __name__ == "__main__":
    absltest.main()
