"""Dynamic metadata for scikit-build-core: the version, with the CUDA major the wheel is built for.

A source distribution is `0.1.0`; a wheel is `0.1.0+cu13` or `0.1.0+cu12` where CMake will find that
CUDA compiler, and `0.1.0` where it will find none.
"""

import importlib.util
import pathlib
from collections.abc import Mapping
from types import ModuleType

VERSION = "0.1.0"

# XLA runs handlers that were compiled against its own or older FFI headers. Building against the
# oldest supported release therefore gives a wheel that serves all of them.
_HEADERS = "jax==0.11.2"


def _load_find_nvcc() -> ModuleType:
    # Loaded by path: this folder is not on sys.path when scikit-build-core loads the provider.
    path = pathlib.Path(__file__).with_name("find_nvcc.py")
    spec = importlib.util.spec_from_file_location("jax_ep_find_nvcc", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def local_version() -> str:
    """Returns "+cu13" or "+cu12" for a build with CUDA, else ""."""
    nvcc = _load_find_nvcc().find_nvcc().nvcc
    return f"+cu{nvcc.version[0]}" if nvcc else ""


class Provider:
    """The hooks that scikit-build-core calls (dynamic-metadata 0.3)."""

    _state = "wheel"

    def build_state(self, build_state: str) -> None:
        """Is told what is being built: "sdist", "wheel", "editable" or metadata for one."""
        self._state = build_state

    def dynamic_metadata(
        self, settings: Mapping[str, object], project: Mapping[str, object]
    ) -> dict[str, str]:
        """Returns the version."""
        del settings, project
        return {"version": VERSION if self._state == "sdist" else VERSION + local_version()}

    def get_requires_for_dynamic_metadata(self, settings: Mapping[str, object]) -> list[str]:
        """Returns the FFI headers as a build requirement, but only where handlers are compiled."""
        del settings
        return [_HEADERS] if local_version() else []
