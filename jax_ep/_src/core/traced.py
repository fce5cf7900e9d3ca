"""Functions of users as what they compute, by which compiled programs are found again.

A function may read anything that changes, so each call of a layer traces it again. Equal traces are
equal here, and arrays that a function closes over are operands: neither compiles anything again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import subjaxprs

CUSTOM_RULES = ("custom_jvp_call", "custom_vjp_call")


class Traced:
    """A function, by what it computes of arrays of the traced shapes and of those it closes over.

    Equal to another one that computes the same, values and first derivatives.
    """

    def __init__(self, jaxpr: Any, out_tree: Any):
        self._jaxpr = jaxpr
        self._out_tree = out_tree
        key: list[Hashable] = [out_tree, _key_of_jaxpr(jaxpr)]
        if has_custom_rules(jaxpr):
            key.append(_derivative_key(jaxpr))
        self._key = tuple(key)
        self._hash = hash(self._key)

    def __call__(self, constants: list[Any], *args: Any) -> Any:
        """Computes the function with these in the place of the arrays that it closes over."""
        flat = jax.core.eval_jaxpr(self._jaxpr, constants, *jax.tree.leaves(args))
        return jax.tree.unflatten(self._out_tree, flat)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Traced) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash


def trace(function: Callable[..., Any], *args: Any) -> tuple[Traced, list[Any]]:
    """Calls the function once, and returns what it computes and the arrays it closes over.

    Args:
      function: of pytrees of arrays.
      *args: arrays, or their shapes.
    """

    def anew(*args: Any) -> Any:  # JAX keeps the trace of a function that it knows
        return function(*args)

    closed, shapes = jax.make_jaxpr(anew, return_shape=True)(*args)
    return Traced(closed.jaxpr, jax.tree.structure(shapes)), list(closed.consts)


def _derivative_key(jaxpr: Any) -> Hashable:
    """The key of the derivative, which tells what the custom rules of a function compute."""

    def pull_back(constants: list[Any], operands: list[Any]) -> Any:
        inputs = [*constants, *operands]
        is_float = [jnp.issubdtype(x.dtype, jnp.inexact) for x in inputs]

        def of_floats(floats: list[Any]) -> list[Any]:
            given = iter(floats)
            full = [next(given) if f else x for f, x in zip(is_float, inputs, strict=True)]
            split = len(constants)
            results = jax.core.eval_jaxpr(jaxpr, full[:split], *full[split:])
            return [y for y in results if jnp.issubdtype(y.dtype, jnp.inexact)]

        results, back = jax.vjp(of_floats, [x for f, x in zip(is_float, inputs, strict=True) if f])
        return back(results)  # as good a cotangent as any

    avals = [v.aval for v in jaxpr.constvars], [v.aval for v in jaxpr.invars]
    try:
        closed = jax.make_jaxpr(pull_back)(*avals)
    except (NotImplementedError, TypeError, ValueError):  # there is no derivative
        return object()
    return _key_of(closed)


def has_custom_rules(jaxpr: Any) -> bool:
    """Whether rules that are functions, of which a trace does not tell, are called in a jaxpr."""
    called = any(eqn.primitive.name in CUSTOM_RULES for eqn in jaxpr.eqns)
    return called or any(map(has_custom_rules, subjaxprs(jaxpr)))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns")


def _key_of(value: Any) -> Hashable:
    """A jaxpr or a parameter of one by value: equal keys compute the same, but for custom rules."""
    if _is_jaxpr(value):
        return tuple(map(_key_of, value.consts)), _key_of_jaxpr(value.jaxpr)
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_key_of, value))
    if isinstance(value, dict):
        return dict, tuple((name, _key_of(value[name])) for name in value)
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return _key_of_array(value)
    try:
        hash(value)
    except TypeError:
        return object()  # equal to nothing else
    return type(value), value


def _key_of_array(value: Any) -> Hashable:
    if isinstance(value, jax.core.Tracer) or jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return object()
    array = np.asarray(value)
    return array.dtype, array.shape, array.tobytes()


def _key_of_jaxpr(jaxpr: Any) -> Hashable:
    numbers: dict[Any, int] = {}

    def number(variable: Any) -> Hashable:
        return numbers.setdefault(variable, len(numbers)), variable.aval

    def atom(operand: Any) -> Hashable:
        if hasattr(operand, "val"):
            return operand.aval, _key_of_array(np.asarray(operand.val))
        return number(operand)

    def equation(eqn: Any) -> Hashable:
        is_rule = eqn.primitive.name in CUSTOM_RULES
        params = tuple(
            (name, _key_of(value))
            for name, value in sorted(eqn.params.items())
            if not is_rule or _is_jaxpr(value)
        )
        inputs, outputs = map(atom, eqn.invars), map(number, eqn.outvars)
        return eqn.primitive, tuple(inputs), tuple(outputs), params

    arguments = tuple(map(number, (*jaxpr.constvars, *jaxpr.invars)))
    equations = tuple(map(equation, jaxpr.eqns))
    return arguments, equations, tuple(map(atom, jaxpr.outvars))
