"""Circuits of dense and sparse models: tasks, patching, ablations, curves.

tasks, generators, metrics    prompts in pairs, aligned for a tokenizer, and what is measured
runs                          a model on a task, under edits
patching                      effects of heads and token edges, exact and by attribution
ablation, discover, curves    circuits of growing size, and how much of the metric they explain
"""
