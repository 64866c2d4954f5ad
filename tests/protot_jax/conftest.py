"""Mixers are tested by many small programs."""

from tests.compilation import quickly_compiled

__all__ = ["quickly_compiled"]
