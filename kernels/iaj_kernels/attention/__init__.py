"""What the attention operations share: visibility masks, tiles, the Mosaic pipeline."""
