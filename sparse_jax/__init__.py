"""Makes the attention of a pretrained language model sparse at equal loss, and reads the result.

After "Sparse Attention Post-Training for Mechanistic Interpretability".

    attend    Bernoulli gates on every edge of a decoder's attention (Eq. 1 to 3)
    geco      a penalty whose strength keeps the loss at its target (Eq. 4, 5 and 7)

Not yet implemented: the post-training command, circuits, transcoders, attribution graphs.
"""
