"""Maps that stand in for softmax, S_p of score rows, and both put into a model."""
