"""Profiles: what blocks of kernels did and waited for."""
