"""Models of checkpoints, for generate.py and finetune.py."""
