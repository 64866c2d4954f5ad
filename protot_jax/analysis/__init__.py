"""Statistics of gates, steering, generation: what is read from a trained model."""
