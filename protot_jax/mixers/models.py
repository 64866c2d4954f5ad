"""The compared models by name: a mixer each, with its norm epsilon and MLP width.

Prototype Transformer, section 4: all have the same width, depth, vocabulary and pre-RMSNorm blocks.
Where the paper is silent or differs, they follow its released code: no biases, an MLP of
16 * floor(2.7 D / 16) units, and none for Mamba. `mamba_ffn` is our addition: Mamba with an MLP
that matches the parameters, and nearly the FLOPs, of ProtoT. `gated_deltanet`,
`gated_slots` and `raven` are newer than the paper's comparison.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, NamedTuple

import numpy as np

from lm_jax.errors import UsageError, nearest
from lm_jax.model.config import DecoderConfig, Rope
from lm_jax.model.decoder import count_params
from lm_jax.model.mixers import AttentionMixer, Mixer
from lm_jax.train.objective import PAD
from protot_jax.mixers.deltanet import DeltaNetMixer
from protot_jax.mixers.gated_deltanet import GatedDeltaNetMixer
from protot_jax.mixers.mamba import MambaMixer
from protot_jax.mixers.prototypes import PrototypeMixer
from protot_jax.mixers.slots import GatedSlotMixer, RavenMixer

# Of the paper's models; wider ones have heads of at most 128 numbers, which attention kernels take.
HEADS, _WIDEST_HEAD = 4, 128
# RoPE rotates pairs of coordinates, so a head's width is even.
_WIDTH_UNIT = 2 * HEADS


class Model(NamedTuple):
    """A mixer with its defaults, the epsilon of the norms, and the MLP width for a config."""

    mixer: Any
    norm_eps: float
    mlp_size: Callable[[DecoderConfig, Mixer], int]


def swiglu_size(cfg: DecoderConfig, mixer: Mixer) -> int:
    """2.7 D, rounded down to a multiple of 16: 688 for a width of 256, 1376 for 512."""
    del mixer
    return 27 * cfg.hidden_size // 160 * 16


def no_mlp(cfg: DecoderConfig, mixer: Mixer) -> int:
    """No MLP: blocks have the mixer only."""
    del cfg, mixer
    return 0


def matched_size(cfg: DecoderConfig, mixer: Mixer) -> int:
    """MLP width, a multiple of 16, with which the parameter count is nearest to ProtoT's."""
    prototypes = MODELS["protot"]
    target_cfg = dataclasses.replace(cfg, mlp_size=prototypes.mlp_size(cfg, prototypes.mixer))
    target = count_params(target_cfg, mixer=prototypes.mixer)

    def difference(units: int) -> int:
        with_mlp = dataclasses.replace(cfg, mlp_size=16 * units)
        return abs(count_params(with_mlp, mixer=mixer) - target)

    return 16 * min(range(1, target_cfg.mlp_size // 16 + 1), key=difference)


MODELS: Mapping[str, Model] = {
    # The default of torch's RMSNorm.
    "protot": Model(PrototypeMixer(), float(np.finfo(np.float32).eps), swiglu_size),
    "llama": Model(AttentionMixer(pattern_dropout=True), 1e-6, swiglu_size),
    "mamba": Model(MambaMixer(), 1e-5, no_mlp),
    "mamba_ffn": Model(MambaMixer(), 1e-5, matched_size),
    "deltanet": Model(DeltaNetMixer(), 1e-6, swiglu_size),
    "gated_deltanet": Model(GatedDeltaNetMixer(), 1e-6, swiglu_size),
    "gated_slots": Model(GatedSlotMixer(), 1e-6, swiglu_size),
    "raven": Model(RavenMixer(), 1e-6, swiglu_size),
}


def build_model(
    name: str,
    *,
    hidden_size: int,
    num_layers: int,
    vocab_size: int,
    context: int,
    tie_embeddings: bool,
    **mixer_options: Any,
) -> tuple[DecoderConfig, Mixer]:
    """Builds the decoder config and the mixer of a model.

    Args:
      name: one of `MODELS`.
      hidden_size: a multiple of 8, for four heads of even width.
      num_layers: number of blocks.
      vocab_size: number of tokens.
      context: the longest training context.
      tie_embeddings: whether the output projection is the token embedding.
      **mixer_options: fields of the mixer that differ from its defaults.

    Raises:
      UsageError: for an unknown name or option, or a width that is not a multiple of 8.
      BadInputError: for a size below one.
    """
    if name not in MODELS:
        raise UsageError(f"there is no model {name!r}{nearest(name, MODELS)}")
    model = MODELS[name]
    known = [field.name for field in dataclasses.fields(model.mixer)]
    for option in mixer_options:
        if option not in known:
            raise UsageError(f"{name} has no option {option!r}{nearest(option, known)}")
    if hidden_size % _WIDTH_UNIT:
        raise UsageError(
            f"hidden_size = {hidden_size} does not give {HEADS} heads of even width; "
            f"choose a multiple of {_WIDTH_UNIT}"
        )
    mixer = dataclasses.replace(model.mixer, **mixer_options)
    heads = HEADS
    if hidden_size > HEADS * _WIDEST_HEAD and hidden_size % _WIDEST_HEAD == 0:
        heads = hidden_size // _WIDEST_HEAD
    cfg = DecoderConfig(
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden_size // heads,
        hidden_size=hidden_size,
        mlp_size=0,
        vocab_size=vocab_size,
        max_length=context,
        norm_eps=model.norm_eps,
        rope=Rope(theta=10_000.0),
        tie_embeddings=tie_embeddings,
        # As padding_idx in torch: the row is initialised at zero, and nothing reads padding.
        pad_id=PAD,
    )
    return dataclasses.replace(cfg, mlp_size=model.mlp_size(cfg, mixer)), mixer
