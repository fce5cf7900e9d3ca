"""The rooms of the code: packages that import one way only, and folders that one look takes in."""

from __future__ import annotations

import ast
import graphlib
import pathlib

from absl.testing import absltest, parameterized

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
SOURCES = REPOSITORY / "jax_ep" / "_src"

# Each imports only from those before it. `serialization` stands beside them, above all.
PACKAGES = (
    "core",
    "profile",
    "quant",
    "transfer",
    "matmul",
    "mlp",
    "routing",
    "moe",
    "layer",
    "checkpoints",
)
MAX_FILES = 20


def imported_modules(path: pathlib.Path) -> set[str]:
    """The modules that a file imports anywhere, with the names that it takes from packages."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def name_of(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


def own_imports() -> dict[str, set[str]]:
    """For each module of jax_ep the modules of jax_ep that it imports."""
    paths = sorted((REPOSITORY / "jax_ep").rglob("*.py"))
    modules = {name_of(path): path for path in paths}
    imports = {}
    for name, path in modules.items():
        found = set()
        for imported in imported_modules(path):
            while imported and imported not in modules:
                imported = imported.rpartition(".")[0]
            found.add(imported)
        imports[name] = found - {"", name}
    return imports


def package_of(module: str) -> str | None:
    """The package below `_src`, or None for another module."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["jax_ep", "_src"] and len(parts) > 2 else None


class ImportsTest(parameterized.TestCase):
    def test_the_packages_are_these(self):
        there = {path.parent.name for path in SOURCES.glob("*/__init__.py")}
        self.assertEqual(there, set(PACKAGES))

    @parameterized.parameters(*enumerate(PACKAGES))
    def test_a_package_imports_only_from_those_before_it(self, index: int, package: str):
        allowed = {*PACKAGES[: index + 1]}
        for module, imports in own_imports().items():
            if package_of(module) == package:
                for imported in imports - {"jax_ep"}:  # for the compiled module
                    self.assertIn(package_of(imported), allowed, f"{module} imports {imported}")

    def test_no_circle(self):
        imports = own_imports()
        inner = {name: of - {"jax_ep"} for name, of in imports.items() if name != "jax_ep"}
        list(graphlib.TopologicalSorter(inner).static_order())  # raises CycleError

    def test_the_library_imports_neither_benchmarks_nor_the_doctor(self):
        for module, imports in own_imports().items():
            if not module.startswith(("jax_ep.bench", "jax_ep.doctor")):
                tools = {
                    name for name in imports if name.startswith(("jax_ep.bench", "jax_ep.doctor"))
                }
                self.assertEmpty(tools, module)


class FoldersTest(absltest.TestCase):
    def test_folders_have_at_most_twenty_files(self):
        folders = [REPOSITORY / "jax_ep", *(REPOSITORY / "jax_ep").rglob("*/")]
        for folder in folders:
            files = [path for path in folder.glob("*") if path.suffix in (".py", ".pyi")]
            self.assertLessEqual(len(files), MAX_FILES, folder)


if __name__ == "__main__":
    absltest.main()
