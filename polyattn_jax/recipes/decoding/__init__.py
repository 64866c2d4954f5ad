"""Decoding with a recipe in every head, in memory that does not grow with the text.

state_attention    windows, feature maps and the Taylor map; `state_mixer`
delta_attention    the gated delta rule
sums               sums over keys that stand for all of them
constant_memory    what both have in common
"""
