"""Checkpoints of Hugging Face's transformers: what their files hold, and how layers take it."""
