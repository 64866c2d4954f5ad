"""Post-training of a pretrained model to sparse attention, with its control."""
