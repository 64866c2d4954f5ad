"""Command-line tools: fetch assets, convert checkpoints, measure speed, regenerate fixtures."""
