"""Makes the attention of a pretrained language model sparse at equal loss, and reads the result.

After "Sparse Attention Post-Training for Mechanistic Interpretability". Not yet implemented:
Bernoulli-gated attention, constrained post-training, circuits, transcoders, attribution graphs.
"""
