"""How well trained models write, and which of them a judge prefers: `iaj protot judge --run=DIR`.

After Prototype Transformer, section 5 (text-generation performance) and appendix B.
"""
