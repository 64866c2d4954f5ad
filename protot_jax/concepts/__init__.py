"""What the prototypes of a trained model stand for: `python -m protot_jax.concepts --run=DIR`.

After Prototype Transformer, section 5.1 and appendices A.7 and A.8.
"""
