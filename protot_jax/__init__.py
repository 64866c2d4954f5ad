"""Language models whose token mixer is R prototype channels that a person can read and edit.

After "Prototype Transformer: Towards Language Model Architectures Interpretable by Design". Not yet
implemented: the mixer and its baselines, pretraining, GLUE, concepts, interventions, robustness.
"""
