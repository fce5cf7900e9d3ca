"""A snapshot of the public API: every public name with its signature, and each result field's shape and dtype.

`python tests/runtime/api_test.py --update` rewrites api.txt. A change there is a change for users: CHANGELOG.md.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pathlib
import sys
import typing

import testing  # isort: skip

import jax
import jax.numpy as jnp
from absl.testing import absltest
from jax.sharding import PartitionSpec as P

import jax_ep
import jax_ep.checkpoints
import jax_ep.linen
import jax_ep.nnx

SNAPSHOT = pathlib.Path(__file__).with_name("api.txt")
MODULES = (
    jax_ep,
    jax_ep.checkpoints,
    jax_ep.linen,
    jax_ep.nnx,
    jax_ep.quant,
    jax_ep.routing,
    jax_ep.typing,
)


def public_names(module) -> list[str]:
    """`__all__`, or what the module defines itself without an underscore."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    own = (
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
    )
    return sorted(name for name in own if not name.startswith("_"))


def signature(value) -> str:
    """As written in the source, whatever the version of Python; a class's is that of its constructor."""
    if inspect.isclass(value) and inspect.isfunction(vars(value).get("__init__")):
        value = value.__init__
    signature = inspect.signature(value)
    parts, star = [], False
    of_flax = {"parent", "name"} if "parent" in signature.parameters else set()
    for name, parameter in signature.parameters.items():
        if name in of_flax:  # every linen.Module has these
            continue
        if parameter.kind == inspect.Parameter.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        annotation = "" if name == "self" else f": {annotation_text(parameter.annotation)}"
        default = (
            "" if parameter.default is parameter.empty else f" = {default_text(parameter.default)}"
        )
        parts.append(name + annotation + default)
    result = signature.return_annotation
    returns = "" if result in (None, signature.empty, "None") else f" -> {annotation_text(result)}"
    return f"({', '.join(parts)}){returns}"


def annotation_text(annotation) -> str:
    if isinstance(annotation, typing.ForwardRef):
        return annotation.__forward_arg__
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def default_text(default) -> str:
    return getattr(default, "__name__", None) or repr(default)


def functions_of(value) -> list:
    """A function, or the public methods of a class, its constructor among them if users call it."""
    if not inspect.isclass(value):
        return [value] if inspect.isfunction(value) else []
    called = {"__call__"} if value is jax_ep.typing.Stack else {"__call__", "__init__"}
    return [
        member
        for name, member in vars(value).items()
        if inspect.isfunction(member)
        and member.__module__.startswith("jax_ep")
        and (name in called or not name.startswith("_"))
    ]


def type_names(function) -> set[str]:
    """The names in a function's annotations, apart from those of other packages, which have dots."""
    signature = inspect.signature(function)
    annotations = [parameter.annotation for parameter in signature.parameters.values()]
    names = set()
    for annotation in (*annotations, signature.return_annotation):
        if annotation is not inspect.Signature.empty:
            tree = ast.parse(annotation_text(annotation))
            dotted = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
            found = (n for n in ast.walk(tree) if isinstance(n, ast.Name) and id(n) not in dotted)
            names |= {n.id for n in found}
    return names


def describe(name: str, value) -> list[str]:
    if inspect.ismodule(value):
        return [f"module {name}"]
    if not callable(value) or typing.get_origin(value) is not None:
        return [f"{name} = {value!r}"]
    if not inspect.isclass(value):
        return [f"{name}{signature(value)}"]
    bases = ", ".join(base.__name__ for base in value.__bases__)
    if issubclass(value, Exception):
        arguments = signature(value.__init__) if "__init__" in vars(value) else ""
        return [f"class {name}({bases}){arguments}"]
    lines = [f"class {name}({bases}){signature(value)}"]
    fields = {f.name for f in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else {}
    for member, method in vars(value).items():
        documented = (member not in fields and not member.startswith("_")) or member == "__call__"
        if documented and inspect.isfunction(method):
            lines.append(f"  {member}{signature(method)}")
        elif documented and isinstance(method, property):
            lines.append(f"  {member}: property")
    return lines


def result_fields() -> list[str]:
    """Every field of a result by the letters of the documentation.

    T tokens per rank, K experts per token, L local experts, H hidden size, M rows.
    """
    num_tokens, top_k, num_local, hidden, num_rows = 11, 3, 5, 8, 77
    letters = {
        num_tokens: "T",
        top_k: "K",
        num_local: "L",
        num_local + 1: "L+1",
        hidden: "H",
        num_rows: "M",
        1: "1",
    }
    struct = jax.ShapeDtypeStruct
    arguments = (
        struct((num_tokens, hidden), jnp.float32),
        struct((num_tokens, top_k), jnp.int32),
        struct((num_tokens, top_k), jnp.float32),
        struct((num_local, hidden, 2, 4), jnp.float32),
        struct((num_local, 4, hidden), jnp.float32),
    )

    def make(x, ids, weights, w_up, w_down):
        sent = jax_ep.dispatch(
            x, ids, weights, num_experts=num_local, axis_name="expert", recv_capacity=num_rows
        )
        _, stats = jax_ep.moe_mlp(x, ids, weights, w_up, w_down, axis_name="expert")
        return sent.plan, sent, stats

    one_rank = testing.expert_mesh(1)
    make = jax.shard_map(make, mesh=one_rank, in_specs=P("expert"), out_specs=P("expert"))
    lines = []
    for result in jax.eval_shape(make, *arguments):
        lines.append(f"# fields of jax_ep.{type(result).__name__}")
        for field in dataclasses.fields(result):
            value = getattr(result, field.name)
            if field.metadata.get("static"):
                lines.append(f"  {field.name}: static {type(value).__name__}")
            elif not hasattr(value, "shape"):
                lines.append(f"  {field.name}: {type(value).__name__}")
            else:
                sizes = [
                    "3" if field.name == "row_source" and axis == 1 else letters[size]
                    for axis, size in enumerate(value.shape)
                ]
                lines.append(f"  {field.name}: {value.dtype}[{', '.join(sizes)}]")
        lines.append("")
    return lines


def current() -> str:
    lines = []
    for module in MODULES:
        lines.append(f"# {module.__name__}")
        for name in public_names(module):
            lines += describe(name, getattr(module, name))
        lines.append("")
    return "\n".join([*lines, *result_fields()])


class ApiTest(absltest.TestCase):
    maxDiff = None

    def test_is_as_recorded(self):
        self.assertMultiLineEqual(SNAPSHOT.read_text(), current())

    def test_contract_of_arguments(self):
        """Arrays first, statics keyword-only; combine's weights have no default, because a forgotten weight is silent."""
        positional = {
            "dispatch": ("x", "topk_ids", "topk_weights"),
            "combine": ("y", "plan", "row_weights"),
            "grouped_matmul": ("lhs", "rhs", "group_sizes"),
            "grouped_matmul_rhs_gradient": ("lhs", "out_gradient", "group_sizes"),
            "moe_mlp": ("x", "topk_ids", "topk_weights", "w_up", "w_down"),
        }
        for name, names in positional.items():
            parameters = inspect.signature(getattr(jax_ep, name)).parameters.values()
            first = [p for p in parameters if p.kind != inspect.Parameter.KEYWORD_ONLY]
            self.assertEqual(tuple(p.name for p in first), names)
            self.assertTrue(all(p.default is inspect.Parameter.empty for p in first), name)
        # The weights of these may be left to combine.
        optional = {
            "grouped_mlp": ("rows", "w_up", "w_down", "group_sizes", "row_weights"),
            "redispatch": ("x", "plan", "topk_weights"),
        }
        for name, names in optional.items():
            parameters = list(inspect.signature(getattr(jax_ep, name)).parameters.values())
            self.assertEqual(tuple(p.name for p in parameters[: len(names)]), names)
            self.assertIsNone(parameters[len(names) - 1].default)
            keyword_only = parameters[len(names) :]
            self.assertTrue(all(p.kind == inspect.Parameter.KEYWORD_ONLY for p in keyword_only))

    def test_one_default_everywhere(self):
        """The same argument has the same default in every function."""
        defaults = {}
        for name in (
            "dispatch",
            "redispatch",
            "combine",
            "grouped_matmul",
            "grouped_matmul_rhs_gradient",
            "grouped_mlp",
            "moe_mlp",
        ):
            for parameter in inspect.signature(getattr(jax_ep, name)).parameters.values():
                if parameter.kind == inspect.Parameter.KEYWORD_ONLY:
                    defaults.setdefault(parameter.name, {})[name] = parameter.default
        defaults.pop("num_experts")  # moe_mlp may take it from the weights
        for name, by_function in defaults.items():
            self.assertLen(set(by_function.values()), 1, f"{name}: {by_function}")
        self.assertEqual(set(defaults["zero_tail"].values()), {True})

    def test_everything_public_is_documented(self):
        for module in MODULES:
            for name in public_names(module):
                value = getattr(module, name)
                if callable(value) and typing.get_origin(value) is None:
                    self.assertTrue(inspect.getdoc(value), f"{module.__name__}.{name}")

    def test_types_in_signatures_are_exported(self):
        known = {name for module in MODULES for name in public_names(module)}
        known |= {
            "Any",
            "Callable",
            "Mapping",
            "Path",
            "dtype",
            "I",
            "R",
            "Sequence",
            "AxisType",
            "Mesh",
            "AbstractMesh",
            "Initializer",
            "Iterator",
            "DTypeLike",
        }
        known |= {"int", "float", "bool", "str", "tuple", "list", "dict"}
        known |= {"Optional", "Union", "NoneType"}  # as dataclasses write `| None`
        for module in MODULES:
            for name in public_names(module):
                for function in functions_of(getattr(module, name)):
                    with self.subTest(function=function.__qualname__):
                        self.assertLessEqual(type_names(function), known)

    def test_all_is_what_there_is(self):
        for name in jax_ep.__all__:
            self.assertTrue(hasattr(jax_ep, name), name)
        self.assertContainsSubset(
            {
                "dispatch", "combine", "grouped_matmul", "grouped_mlp", "moe_mlp", "Plan", "Dispatched", "mask_tail",
                "grouped_matmul_rhs_gradient", "redispatch", "Stats", "memory", "release", "check", "build_info", "export_checks", "REMAT_NAMES", "nnx",
                "routing", "quant", "Error",
            },
            set(jax_ep.__all__),
        )  # fmt: skip


if __name__ == "__main__":
    if "--update" in sys.argv:
        SNAPSHOT.write_text(current())
    else:
        absltest.main()
