"""A whole mixture-of-experts block."""
