"""Prepares the tier before any test module can start a JAX backend, and collects what belongs to it."""

import os
import pathlib

import testing  # noqa: F401  starts the backend of the tier
import tier

tier.check_installation()

# Some tests run themselves in processes of their own, which find the helpers there.
HELPERS = str(pathlib.Path(__file__).with_name("helpers"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HELPERS, os.environ.get("PYTHONPATH")]))

_OF_TIER = set(tier.suites())
collect_ignore = [str(path) for path in tier.FOLDER.glob("*/*_test.py") if path not in _OF_TIER]


def pytest_collection_modifyitems(config, items):
    """Leaves out what `tier.only_on_cpu` and `tier.needs_gpus` mark for other tiers."""
    of_tier, others = [], []
    for item in items:
        parts = getattr(item, "function", None), getattr(item, "cls", None)
        (of_tier if tier.is_collected(*parts) else others).append(item)
    if others:
        items[:] = of_tier
        config.hook.pytest_deselected(items=others)
