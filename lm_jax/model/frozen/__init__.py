"""Frozen mixers: on one prompt, what a mixer adds to the residual stream is linear in the stream.

The weights that a mixer gives to pairs of positions (attention patterns, gates of prototypes) and
the divisors of norms are computed once and then held. What is left of a block's mixer are linear
maps, run upwards for what is added to the stream and downwards for derivatives:

    values          of the normed stream, at the positions they are read from
    mix             values weighted by the pattern, projected back into the stream
    cotangents      derivatives by the weighted sums of values, of those by the mixer's output
    transpose       derivatives by the normed stream, of those
    shares          how much of `cotangents . weighted values` passes each entry of the pattern
    head_shares     the same by head

A batch of streams or derivatives has the axis X. N counts heads or prototypes.

blocks      the protocol of a mixer, and the maps of all blocks with their norms
attention   attention, with its pattern stored or computed again from queries and keys
"""

from lm_jax.model.frozen.blocks import (
    FreezableMixer,
    FrozenLayers,
    FrozenMixer,
    centre,
    divisors,
    freeze_layers,
    frozen_sites,
    mixer_sites,
    mlp_norm_sites,
    norm_factor,
    norm_weight,
)

__all__ = [
    "FreezableMixer",
    "FrozenLayers",
    "FrozenMixer",
    "centre",
    "divisors",
    "freeze_layers",
    "frozen_sites",
    "mixer_sites",
    "mlp_norm_sites",
    "norm_factor",
    "norm_weight",
]
