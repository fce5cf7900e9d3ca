"""Grouped matmuls."""
