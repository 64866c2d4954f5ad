"""The decoder: config, parameters, layers, mixers, sites, edits, decoding. No input or output."""
