"""Analysis of what the prototypes of a trained model respond to: `iaj protot concepts --run=DIR`.

After Prototype Transformer, section 5.1 and appendices A.7 and A.8.
"""
