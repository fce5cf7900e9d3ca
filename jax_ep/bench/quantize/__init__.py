"""Quantizing rows and weights."""
