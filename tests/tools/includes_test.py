"""Folders of C++ include each other one way, and none has more files than can be overlooked."""

from __future__ import annotations

import collections
import pathlib
import re

from absl.testing import absltest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MAX_FILES = 20

# From the bottom to the top: a folder includes itself and those before it. A folder that is not
# named counts as the next one around it that is.
LAYERS = (
    "ffi/device/common",
    "ffi/device/ptx",
    "ffi/device/profile",
    "ffi/device/matmul",
    "ffi/device/quantize",
    "ffi/device/protocol",
    "ffi/device/transfer",
    "ffi/device/transfer/dispatch",
    "ffi/device/transfer/combine",
    "ffi/device/transfer/low_latency",
    "ffi/device/transfer/hierarchical",
    "ffi/runtime",  # settings and status
    "ffi/runtime/cuda",
    "ffi/runtime/profile",
    "ffi/runtime/calls",
    "ffi/runtime/transport",
    "ffi/runtime/transport/local",
    "ffi/runtime/network",
    "ffi/runtime/network/nvshmem",
    "ffi/runtime/network/ucx",
    "ffi/runtime/groups",
    "ffi/kernels",
    "ffi/handlers",
    "ffi",  # the Python module
)
# Kernels see neither groups nor the way to other processes, and the runtime sees no kernels.
APART = {
    "ffi/kernels": ("ffi/runtime/groups", "ffi/runtime/transport"),
    "ffi/runtime": ("ffi/kernels", "ffi/handlers"),
}
# The rooms of the sm_90 matmul, which stand on shapes, tensor maps and the pipeline.
ROOMS = {
    "schedule": {"schedule"},
    "load": {"load"},
    "epilogue": {"epilogue"},
    "mainloop": {"mainloop", "epilogue"},
}


def sources(*folders: str) -> list[str]:
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def includes(source: str) -> list[str]:
    return re.findall(r'^#include "(ffi/[^"]+)"', (ROOT / source).read_text(), re.MULTILINE)


def layer(path: str) -> int:
    folder = pathlib.PurePosixPath(path).parent
    while str(folder) not in LAYERS:
        folder = folder.parent
    return LAYERS.index(str(folder))


class IncludesTest(absltest.TestCase):
    def test_includes_are_found(self):
        self.assertIn("ffi/runtime/status.h", includes("ffi/runtime/settings.h"))
        self.assertEqual(layer("ffi/kernels/matmul/sm90/kernels.h"), LAYERS.index("ffi/kernels"))

    def test_folders_include_one_way(self):
        for source in sources("ffi"):
            for included in includes(source):
                with self.subTest(source=source, included=included):
                    self.assertTrue((ROOT / included).exists())
                    self.assertLessEqual(layer(included), layer(source))

    def test_what_stands_apart(self):
        for folder, forbidden in APART.items():
            for source in sources(folder):
                seen = [name for name in includes(source) if name.startswith(forbidden)]
                self.assertEmpty(seen, source)

    def test_rooms_of_the_matmul_include_one_way(self):
        matmul = "ffi/device/matmul/sm90/"
        for room, allowed in ROOMS.items():
            for source in sources(matmul + room):
                parts = [name.removeprefix(matmul).split("/") for name in includes(source)]
                rooms = {part[0] for part in parts if len(part) == 2 and part[0] in ROOMS}
                self.assertLessEqual(rooms, allowed, source)

    def test_no_folder_has_too_many_files(self):
        counts = collections.Counter(
            str(pathlib.PurePosixPath(source).parent) for source in sources("ffi", "tests/cpp")
        )
        self.assertEmpty({name: n for name, n in counts.items() if n > MAX_FILES})


if __name__ == "__main__":
    absltest.main()
