"""A model that finds needles, and documents of words that it knows."""

from tests.study_flags.polyattn_distill import flags

__all__ = ["flags"]
