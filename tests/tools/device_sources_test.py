"""Rules of the transfers' device code that no compiler checks."""

from __future__ import annotations

import pathlib
import re

from absl.testing import absltest

DEVICE = pathlib.Path(__file__).resolve().parents[2] / "ffi" / "device"


def find(pattern: str) -> set[str]:
    """Returns the files of the protocol and the transfers that have the pattern in their code.

    role_context.cuh, which makes the contexts of roles, may have all of them.
    """
    files = [*DEVICE.glob("protocol/**/*"), *DEVICE.glob("transfer/**/*")]
    found = set()
    for path in filter(pathlib.Path.is_file, files):
        code = re.sub(r"//.*", "", path.read_text())
        if path.name != "role_context.cuh" and re.search(pattern, code):
            found.add(str(path.relative_to(DEVICE)))
    return found


class DeviceSourcesTest(absltest.TestCase):
    def test_code_is_found(self):
        self.assertIn("protocol/signal.cuh", find("StoreEntry"))

    def test_roles_know_their_threads_by_their_context(self):
        """Another kernel's warps can run a role that asks its RoleContext only."""
        own = r"\b(threadIdx|blockIdx|blockDim|gridDim|__shared__|DynamicSharedMemory)\b"
        self.assertEqual(find(own), set())
        # The end of a kernel is not a role's: all threads of all blocks take part.
        self.assertEqual(find("__syncthreads"), {"protocol/kernel_end.cuh"})

    def test_few_files_store_to_peers(self):
        """Addresses of peers become PeerPointers where they are made."""
        makes_pointers = {
            "protocol/peer_stores.cuh",
            "transfer/eager_buffers.cuh",
            "transfer/hierarchical/rail.cuh",
        }
        self.assertEqual(find(r"->peers\["), makes_pointers)


if __name__ == "__main__":
    absltest.main()
