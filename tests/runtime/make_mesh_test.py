"""Meshes of several hosts, whose devices are stand-ins, and of one host."""

from __future__ import annotations

import dataclasses
import random

import testing  # isort: skip  # noqa: F401  sets the devices

import jax
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import AxisType

import jax_ep
from jax_ep._src.core.make_mesh import by_host


@dataclasses.dataclass(frozen=True)
class Device:
    """The attributes of a device that its place in a mesh depends on."""

    id: int
    slice_index: int
    process_index: int = 0
    platform: str = "gpu"
    device_kind: str = "NVIDIA H100"


def cluster(*sizes: int) -> list[Device]:
    """Hosts with so many devices, one after the other, each device of a process of its own."""
    hosts = [host for host, size in enumerate(sizes) for _ in range(size)]
    return [Device(id, host, id) for id, host in enumerate(hosts)]


def ids(mesh) -> list:
    return np.vectorize(lambda device: device.id)(mesh.devices).tolist()


class SeveralHostsTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("a_host_each", (4, 4), (2, 4), ("data", "expert"), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("half_a_host", (4, 4), (4, 2), ("data", "expert"), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("experts_first", (2, 2), (2, 2), ("expert", "data"), [[0, 2], [1, 3]]),
        (
            "in_the_middle",
            (4, 4),
            (2, 2, 2),
            ("data", "expert", "tensor"),
            [[[0, 2], [1, 3]], [[4, 6], [5, 7]]],
        ),
        ("hosts_of_two_sizes", (4, 2), (3, 2), ("data", "expert"), [[0, 1], [2, 3], [4, 5]]),
        ("larger_than_a_host", (2, 2, 2, 2), (2, 4), ("data", "expert"), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("all_hosts", (4, 2), (6,), ("expert",), [0, 1, 2, 3, 4, 5]),
        ("fewer_than_all", (4, 4), (1, 2), ("data", "expert"), [[0, 1]]),
        ("whole_groups_of_each_host", (3, 3), (2, 2), ("data", "expert"), [[0, 1], [3, 4]]),
    )  # fmt: skip
    def test_layout(self, hosts, sizes, names, expected):
        mesh = jax_ep.make_mesh(sizes, names, devices=cluster(*hosts))
        self.assertEqual(ids(mesh), expected)
        self.assertEqual(mesh.axis_names, names)

    def test_several_expert_axes(self):
        sizes, names = (2, 2, 2), ("inner", "data", "outer")
        mesh = jax_ep.make_mesh(sizes, names, expert_axis=("outer", "inner"), devices=cluster(4, 4))
        # rank 2 * outer + inner
        self.assertEqual(ids(mesh), [[[0, 2], [4, 6]], [[1, 3], [5, 7]]])

    def test_no_expert_axis(self):
        mesh = jax_ep.make_mesh((2, 2), ("a", "b"), expert_axis=(), devices=cluster(2, 2))
        self.assertEqual(ids(mesh), [[0, 1], [2, 3]])

    def test_any_order_of_devices(self):
        """Processes whose numbers alternate between two hosts; and any order at all."""
        interleaved = [Device(id, id % 2, id) for id in range(8)]
        mesh = jax_ep.make_mesh((2, 4), ("data", "expert"), devices=interleaved)
        self.assertEqual(ids(mesh), [[0, 2, 4, 6], [1, 3, 5, 7]])
        for seed in range(3):
            shuffled = random.Random(seed).sample(interleaved, 8)
            again = jax_ep.make_mesh((2, 4), ("data", "expert"), devices=shuffled)
            self.assertEqual(ids(again), ids(mesh))

    def test_every_process_a_slice_of_its_own(self):
        """As where nothing tells JAX which processes share a host."""
        devices = [Device(id, id // 2, id // 2) for id in range(8)]
        mesh = jax_ep.make_mesh((2, 4), ("data", "expert"), devices=devices)
        self.assertEqual(ids(mesh), [[0, 1, 2, 3], [4, 5, 6, 7]])

    def test_each_group_has_one_host(self):
        """Against the definition, for all that fits."""
        devices = cluster(8, 8, 8)
        for ranks in (1, 2, 4, 8):
            for sizes in ((24 // ranks, ranks, 1), (3, ranks, 8 // ranks)):
                names = ("data", "expert", "tensor")
                mesh = jax_ep.make_mesh(sizes, names, devices=devices)
                groups = np.moveaxis(mesh.devices, 1, -1).reshape(-1, ranks)
                for group in groups:
                    self.assertLen(by_host(group), 1)
                    first = group[0].id
                    self.assertEqual([d.id for d in group], list(range(first, first + ranks)))
                self.assertLen({d.id for d in mesh.devices.flat}, 24)

    def test_types(self):
        devices = cluster(2, 2)
        auto = (AxisType.Auto,) * 2
        sizes, names = (2, 2), ("data", "expert")
        self.assertEqual(jax_ep.make_mesh(sizes, names, auto, devices=devices).axis_types, auto)
        explicit = (AxisType.Explicit,) * 2  # JAX's default
        self.assertEqual(jax_ep.make_mesh(sizes, names, devices=devices).axis_types, explicit)

    @parameterized.named_parameters(
        ("three_of_four", (4, 4), (2, 3), "2 groups of 3 ranks.*4 devices hold 2; expected", False),
        ("does_not_divide", (4, 4, 4), (4, 3), "4 groups of 3 .* hold 3; .* of 1 or 2 or 4 ranks", True),
        ("two_sizes", (4, 2), (1, 6 - 2 + 1), "1 groups of 5 .* with 2 or 4 devices hold 0; .* 1 or 2 ranks", True),
        ("part_of_a_host", (4, 4), (1, 6), "hosts with 4 devices hold 0", True),
        ("too_many", (4, 4), (4, 4), "a product of at most 8", True),
        ("minus_one", (4, 4), (-1, 4), "a positive size for each axis", True),
        ("a_size_is_missing", (4, 4), (4,), r"\(4,\) of the axes \('data', 'expert'\)", True),
    )  # fmt: skip
    def test_what_does_not_fit(self, hosts, sizes, message, is_error):
        make = lambda: jax_ep.make_mesh(sizes, ("data", "expert"), devices=cluster(*hosts))
        if is_error:
            with self.assertRaisesRegex(jax_ep.ArgumentError, message):
                make()
        else:
            self.assertEqual(ids(make()), [[0, 1, 2], [4, 5, 6]])


class OneHostTest(parameterized.TestCase):
    @parameterized.parameters(
        ((4, 2), ("data", "expert")),
        ((8,), ("expert",)),
        ((2,), "expert"),
        ((2, 2), ("expert", "x")),
    )
    def test_as_jax_makes_it(self, sizes, names):
        self.assertEqual(jax_ep.make_mesh(sizes, names), jax.make_mesh(sizes, names))
        devices = jax.devices()[::-1]
        types = (AxisType.Auto,) * len(sizes)
        expected = jax.make_mesh(sizes, names, axis_types=types, devices=devices)
        got = jax_ep.make_mesh(sizes, names, axis_types=types, devices=devices)
        self.assertEqual(got, expected)

    def test_errors_of_jax(self):
        with self.assertRaisesRegex(ValueError, "Number of devices 8 must be >="):
            jax_ep.make_mesh((16,), ("expert",))

    def test_an_axis_that_is_not_there(self):
        """An error on one host, too, where a program is tried first."""
        for expert_axis in ("expert", ("ep", "ep"), ("ep", "tp")):
            with self.assertRaisesRegex(jax_ep.ArgumentError, r"one or several of \('dp', 'ep'\)"):
                jax_ep.make_mesh((2, 4), ("dp", "ep"), expert_axis=expert_axis)
        jax_ep.make_mesh((2, 4), ("dp", "ep"), expert_axis="ep")


if __name__ == "__main__":
    absltest.main()
