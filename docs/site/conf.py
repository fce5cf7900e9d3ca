"""Makes the site of README.md, docs/ and the docstrings: `make docs`.

The source folder is the root of the repository, so that each page is the file that GitHub shows,
with the same links. Notebooks are run. A link to a file that is no page, such as an example,
downloads that file.
"""

from __future__ import annotations

import pathlib
import re
import sys
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import NoUri
from sphinx.util import inspect, logging

import jax_ep

ROOT = pathlib.Path(__file__).resolve().parents[2]
PUBLIC_NAMES = ROOT / "tests" / "runtime" / "api.txt"
# Replaced in signatures: aliases in unions, defaults, what every linen.Module has.
REWRITTEN = (
    (r"TypeAliasForwardRef\('([\w.]+)'\)", r"\1"),
    (r"<(?:class|function) '?([\w.]+)'?>", r"\1"),
    (r"parent: [^,]*_Sentinel[^,]*, name: [^,]*, ", ""),
)
# Docstrings of named tuples, which Python writes.
WRITTEN_BY_PYTHON = ("Alias for field number", "Create new instance of")

project = "jax_ep"
author = "the authors of jax_ep"
version = release = jax_ep.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**"]
# Kept out of the search for pages, which would walk through environments and builds.
exclude_patterns = [path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "docs"]

html_theme = "sphinx_book_theme"
html_title = "jax_ep"
html_extra_path = ["index.html"]
html_copy_source = False
html_theme_options = {"show_toc_level": 2, "use_download_button": False}

nitpicky = True
# Arguments of constructors that jax_ep itself calls.
nitpick_ignore_regex = [("py:class", r"jax_ep\._src\..*")]
myst_heading_anchors = 4
# Notebooks are kept without outputs, which every build makes anew.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300

default_role = "py:obj"
autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_type_aliases = {name: f"jax_ep.typing.{name}" for name in jax_ep.typing.__all__} | {
    name: f"jax_ep.checkpoints.{name}" for name in ("GateBias", "OtherSpecs", "Params")
}
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def _pages(folder: str, *names: str) -> list[str]:
    return [f"docs/{folder}/{name}" for name in names]


# The site's order. It stands here because GitHub would show it as text in README.md.
CONTENTS = {
    "Start": _pages("start", "fit", "install", "first_layer", "which_call"),
    "Guides": [
        *_pages("guides", "layer", "migrate", "models", "checkpoints", "meshes", "stacks"),
        *_pages("guides", "experts", "recipes", "memory", "quantization", "fp8_training"),
        *_pages("guides", "processes", "hosts", "inference", "overlap", "profiling"),
        *_pages("guides", "sharp_bits", "hangs"),
    ],
    "Reference": [
        *_pages("reference", "operations", "layers", "routing", "quant", "checkpoints", "runtime"),
        *_pages("reference", "types", "errors", "environment", "compatibility"),
        "CHANGELOG",
    ],
    "Design": [
        *_pages("design", "README", "plan", "transfer", "protocol", "matmul"),
        *_pages("design", "quantized_matmul", "numerics", "runtime", "testing", "glossary"),
        "CONTRIBUTING",
    ],
    "Performance": _pages("performance", "README", "layer_times", "eight_bits", "hosts", "overlap"),
    "Lab notes": [
        *_pages(
            "lab_notes", "README", "transfer", "domains", "matmul", "swapped_operands", "few_rows"
        ),
        *_pages("lab_notes", "fp8", "mxfp4", "layer", "quantize", "overlap"),
    ],
}


def public_names() -> list[str]:
    """Reads the qualified names in the snapshot of the public API."""
    names, module = [], ""
    for line in PUBLIC_NAMES.read_text().partition("# fields of")[0].splitlines():
        if line.startswith("# "):
            module = line.removeprefix("# ")
        elif line and not line.startswith(" "):
            name = line.removeprefix("class ").removeprefix("module ")
            names.append(f"{module}.{name.partition('(')[0].partition(' ')[0]}")
    return names


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Ends the start page with the tables of contents."""
    if page == root_doc:
        for caption, pages in CONTENTS.items():
            lines = ["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```"]
            source[0] += "\n" + "\n".join(lines) + "\n"


def sign(
    app: Sphinx, kind: str, name: str, value: Any, options: Any, arguments: str | None, result: str
) -> tuple[str | None, str]:
    """Shows a constructor's arguments, which Flax hides, and names instead of representations."""
    if kind == "class" and arguments == "(*args: Any, **kwargs: Any)":
        aliases = app.config.autodoc_type_aliases
        found = inspect.signature(value.__init__, bound_method=True, type_aliases=aliases)
        arguments = inspect.stringify_signature(found, show_return_annotation=False)
    for pattern, shown in REWRITTEN:
        arguments = arguments and re.sub(pattern, shown, arguments)
        result = result and re.sub(pattern, shown, result)
    return arguments, result


def describe(app: Sphinx, kind: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Leaves out what Python writes, and takes the text of an alias from its module's docstring."""
    lines[:] = [line for line in lines if not line.startswith(WRITTEN_BY_PYTHON)]
    if kind in ("data", "type"):
        module, _, alias = name.rpartition(".")
        described = (sys.modules[module].__doc__ or "").splitlines()
        texts = [line.split(": ", 1) for line in described if ": " in line]
        lines[:] = [text for names, text in texts if alias in names.split(", ")]


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, text: nodes.TextElement
) -> nodes.Node | None:
    """Links a name that Sphinx does not find where it stands to its public name.

    Other packages' names and names of arguments become plain code. What is left without a link, and
    is an error, are names that say to be of jax_ep.
    """
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"].removesuffix("()").split(" (")[0]  # "ArgumentError (a ValueError)"
    known = env.domains.python_domain.objects
    modules = ("", "jax_ep.", *(f"{m}." for m in known if known[m].objtype == "module"))
    for candidate in (module + target for module in modules):
        if candidate in known:
            return env.domains.python_domain.resolve_xref(
                env, node["refdoc"], app.builder, "obj", candidate, node, text
            )
    if target.startswith("jax_ep."):
        return None
    raise NoUri  # no link, no warning


def check_complete(app: Sphinx, env: BuildEnvironment) -> None:
    """Warns of public names that the reference lacks."""
    for name in sorted({*public_names()} - {*env.domains.python_domain.objects}):
        logging.getLogger(__name__).warning("docs/reference lacks %s", name)


def setup(app: Sphinx) -> None:
    """Connects the functions above."""
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", describe)
    app.connect("autodoc-process-signature", sign)
    app.connect("missing-reference", resolve)
    app.connect("env-check-consistency", check_complete)
