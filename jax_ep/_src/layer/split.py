"""Functions of users that hold arrays: a `functools.partial`, or a pytree with a ``__call__``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


class SplitFunction:
    """A function as its arrays, which a `shard_map` must take as arguments, and the rest."""

    def __init__(self, function: Callable[..., Any]):
        if isinstance(function, functools.partial):  # a leaf otherwise
            function = jax.tree_util.Partial(function.func, *function.args, **function.keywords)
        leaves, self._structure = jax.tree.flatten(function)
        self._is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
        self._others = [leaf for leaf in leaves if not isinstance(leaf, jax.Array | np.ndarray)]
        self.arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array | np.ndarray)]

    def merge(self, arrays: list[jax.Array]) -> Callable[..., Any]:
        """The function with these arrays in the place of its own."""
        of_kind = {True: iter(arrays), False: iter(self._others)}
        merged: Callable[..., Any] = jax.tree.unflatten(
            self._structure, [next(of_kind[a]) for a in self._is_array]
        )
        return merged
