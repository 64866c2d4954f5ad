"""Fine-tuning of pretrained models on sentence tasks: GLUE, and tasks of embedded real text.

After Prototype Transformer, section 5 and appendix A.4 (Tables 2 and 10).
"""
