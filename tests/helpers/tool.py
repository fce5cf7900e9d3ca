"""Imports what lies in tools/ and is no part of a package."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import types

TOOLS = pathlib.Path(__file__).resolve().parents[2] / "tools"
sys.path.append(str(TOOLS))  # they import each other


def load(name: str) -> types.ModuleType:
    """Returns a new module of NAME.py in tools/ or a folder of it."""
    (path,) = TOOLS.rglob(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
