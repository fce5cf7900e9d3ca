"""The Python blocks of README and of the guides run as a reader types them: each in a new interpreter, with no setting but its own."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tempfile

import tier
from absl.testing import absltest, parameterized

ROOT = pathlib.Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
# Guides whose blocks are excerpts, or need several processes, and one without.
EXCEPT = "processes", "hosts", "quantization", "hangs"
GUIDES = [path for path in sorted((DOCS / "guides").glob("*.md")) if path.stem not in EXCEPT]
PAGES = README, *GUIDES
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [block for page in PAGES for block in BLOCK.findall(page.read_text())]
# Settings that the tests make for themselves, or a developer has.
SETTINGS = ("JAX_", "XLA_")


class ReadmeTest(parameterized.TestCase):
    def test_there_are_blocks(self) -> None:
        for page in PAGES:
            self.assertNotEmpty(BLOCK.findall(page.read_text()), page)

    def test_is_read_in_a_minute_or_two(self) -> None:
        self.assertLess(len(README.read_text().split()), 1000)

    @parameterized.parameters(*((block,) for block in BLOCKS))
    def test_block_runs(self, source: str) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(SETTINGS)}
        environment |= tier.CPU_SETTINGS  # which change how long XLA compiles
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder) / "typed.py"
            program.write_text(source)
            # Some read the tests' data, as from a checkout's root.
            (pathlib.Path(folder) / "tests").symlink_to(ROOT / "tests")
            result = subprocess.run(
                [sys.executable, program],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=600,
            )
        self.assertEqual(result.returncode, 0, f"{source}\n{result.stdout}\n{result.stderr}")


if __name__ == "__main__":
    absltest.main()
