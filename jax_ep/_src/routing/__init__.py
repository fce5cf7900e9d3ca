"""Routers, their losses, and their load."""
