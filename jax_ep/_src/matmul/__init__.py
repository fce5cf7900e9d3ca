"""Grouped matmuls: one matrix for each group of consecutive rows."""
