"""The compiled module: jax_ep's own, or that of an installed plugin, which has the CUDA kernels.

The wheels jax-ep-cuda13 and jax-ep-cuda12 are such plugins: a package with a compiled module in the
place of jax_ep._ffi. A jax_ep that was built with CUDA looks for none.
"""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import sys
from types import ModuleType

from jax_ep._src.core.errors import MissingExtensionError

PLUGINS = ("jax_ep_cuda13", "jax_ep_cuda12")
"""The packages of plugins; the first that is installed is used."""

try:
    from jax_ep import _ffi as own_module
except ImportError as error:
    folder = pathlib.Path(__file__).parents[2]
    raise MissingExtensionError(
        f"jax_ep was imported from {folder}, which has no compiled module "
        f"jax_ep._ffi that this Python can load ({error}). If that is a source checkout, run "
        "Python from another folder to use the installed package, or install the checkout "
        "(`pip install .`)."
    ) from error


def plugin_module(version: str) -> ModuleType | None:
    """Imports the compiled module of the installed plugin; returns None if there is no plugin.

    Args:
      version: that of jax_ep, which the plugin must have: they call each other.

    Raises:
      MissingExtensionError: the plugin has another version, or its module cannot be loaded.
    """
    for name in PLUGINS:
        spec = importlib.util.find_spec(name)  # quicker than a search of all packages' metadata
        if spec is None or spec.origin is None:  # an empty folder counts as a package, too
            continue
        plugin, package = importlib.import_module(name), name.replace("_", "-")
        if plugin.__version__ != version:
            raise MissingExtensionError(
                f"{package} {plugin.__version__} is installed beside jax-ep {version}, but needs "
                f"the same version. Run `pip install {package}=={version}`, or "
                f"`pip uninstall {package}` to do without CUDA kernels."
            )
        try:
            return importlib.import_module(f"{name}._ffi")
        except ImportError as error:
            raise MissingExtensionError(
                f"{package} {version} is installed, but this Python cannot load its compiled "
                f"module ({error}). Run `pip install --force-reinstall --no-deps "
                f"{package}=={version}`, or `pip uninstall {package}` to do without CUDA kernels."
            ) from error
    return None


def choose() -> ModuleType:
    """Returns the compiled module to use, after making it jax_ep._ffi for all that import it."""
    info = own_module.build_info()
    plugin = None if info["cuda"] else plugin_module(info["version"])
    if plugin is None:
        return own_module
    sys.modules["jax_ep._ffi"] = plugin
    sys.modules["jax_ep"]._ffi = plugin  # type: ignore[attr-defined]
    return plugin


module = choose()
