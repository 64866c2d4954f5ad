"""Shared by the attention operations: visibility masks, tiles, the Mosaic pipeline."""
