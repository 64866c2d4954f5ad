"""Commands: post-training, pairs, circuits, transcoders, graphs, toy models."""
