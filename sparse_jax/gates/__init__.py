"""Bernoulli gates on attention, their objective, and the sparse model."""
