"""Base of every other package: errors, checks, primitives, the compiled module."""
