"""What the attention operations share: which keys a query may read, tiles, the Mosaic pipeline."""
