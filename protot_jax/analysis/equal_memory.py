"""The floats that a mixer carries from token to token, and models in which they are equally many.

A recurrent mixer's memory is what tokens write into and read: its prototypes' sums, its matrices or
its slots. Beside it a mixer carries little that nothing can be recalled from beyond a few tokens:
the inputs of short convolutions, and the masses by which sums are divided. Counts are those of one
sequence and one layer, from the decoding cache itself. Attention has no such size: it carries keys
and values of every token.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from iaj_kernels.prefix_mean.state import State
from lm_jax.errors import UsageError
from lm_jax.model.config import DecoderConfig
from lm_jax.model.mixers import Mixer
from protot_jax.mixers.deltanet import DeltaNetMixer
from protot_jax.mixers.models import build_model

# The field of a mixer that its memory is proportional to.
_FIELDS = {
    "protot": "num_prototypes",
    "mamba": "state_size",
    "mamba_ffn": "state_size",
    "gated_slots": "num_slots",
    "raven": "num_slots",
}


class StateSize(NamedTuple):
    """Floats of a layer's state: those of the memory, and all others."""

    memory: int
    other: int


def state_size(cfg: DecoderConfig, mixer: Mixer, length: int = 1) -> StateSize:
    """The state of one layer after `length` tokens of one sequence."""
    cache = jax.eval_shape(lambda: mixer.init_cache(cfg, 1, length, jnp.float32))
    if not mixer.recurrent:
        return StateSize(_floats(cache), 0)
    held = cache["state"]
    memory = _floats(held.total_BRE if isinstance(held, State) else held)
    return StateSize(memory, _floats(cache) - memory)


def matched_model(name: str, memory: int, **shape: Any) -> tuple[DecoderConfig, Mixer]:
    """A model of `models.MODELS` whose layers have `memory` floats each.

    Prototypes, Mamba and slots get as many channels, states or slots as that takes. The matrices of
    a delta rule have width / heads rows and columns, so that it gets fewer or more heads. Attention
    is as it is.

    Args:
      name: name of the model.
      memory: floats of a layer.
      **shape: the model's shape, arguments of `build_model`.

    Raises:
      UsageError: no size of the mixer has just so many floats, or as `build_model`.
    """
    cfg, mixer = build_model(name, **shape)
    if not mixer.recurrent:
        return cfg, mixer
    width = cfg.hidden_size
    if isinstance(mixer, DeltaNetMixer):
        heads = width**2 // memory if memory else 0
        if heads < 1 or width % heads or width**2 != heads * memory:
            raise UsageError(
                f"config.memory = {memory}: {name} has config.hidden_size^2 / heads floats, and "
                f"heads divide {width}; choose {width**2 // 4}, say"
            )
        size = {"num_heads": heads, "num_kv_heads": heads, "head_dim": width // heads}
        return dataclasses.replace(cfg, **size), mixer
    field = _FIELDS[name]
    one: dict[str, Any] = {**shape, field: 1}
    unit = state_size(*build_model(name, **one)).memory
    if memory < unit or memory % unit:
        raise UsageError(
            f"config.memory = {memory}: {name} has {unit} floats for each of its {field}; choose a "
            f"multiple of {unit}"
        )
    return build_model(name, **(one | {field: memory // unit}))


def _floats(tree: Any) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(leaf.size for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating))
