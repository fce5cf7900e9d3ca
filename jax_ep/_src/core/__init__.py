"""What every other package is made of: errors, checks, primitives, the compiled module."""
