"""Sets the number of devices before any test module can start a JAX backend."""

import testing  # noqa: F401
