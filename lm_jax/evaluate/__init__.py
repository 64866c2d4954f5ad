"""Evaluation of language models: multiple choice, and the interface of lm-evaluation-harness."""
