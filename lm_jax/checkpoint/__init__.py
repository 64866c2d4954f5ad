"""Checkpoints: the verified folder (`format`), those of a training run (`manager`), adapters."""
