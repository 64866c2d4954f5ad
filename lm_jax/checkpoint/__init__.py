"""Checkpoints: the verified folder (`folder`), those of a training run (`manager`), adapters."""
