"""Similarity of sentences: the cosine of their vectors by all-MiniLM-L6-v2 (an asset, `minilm`).

Reimers & Gurevych 2019, Wang et al. 2020: a BERT of six layers (Devlin et al. 2019: learned
positions, layer norm after each residual sum, exact GELU), whose outputs are averaged over tokens
and brought to length one. The weights are read from safetensors; nothing of the package is run.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.flax
import tokenizers

from lm_jax import assets
from lm_jax.model.precision import exact_jit

ASSET = "minilm"
_LAYERS, _HEADS, _EPSILON = 6, 12, 1e-12
# The model was trained on at most so many tokens.
_LONGEST = 128
_ROWS = 32
_PAD = 0


class Encoder:
    """The sentence encoder.

    Raises:
      BadInputError: the asset is not in the cache.
    """

    def __init__(self) -> None:
        self._params = safetensors.flax.load_file(assets.path(ASSET, "model.safetensors"))
        self._tokenizer = tokenizers.Tokenizer.from_file(str(assets.path(ASSET, "tokenizer.json")))
        self._tokenizer.enable_truncation(_LONGEST)
        self._tokenizer.no_padding()

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of length one, `[N, 384]`."""
        parts = []
        for start in range(0, len(texts), _ROWS):
            rows = [each.ids for each in self._tokenizer.encode_batch(texts[start : start + _ROWS])]
            # Few sizes, so that few programs are compiled.
            height, width = -(-len(rows) // 8) * 8, -(-max(map(len, rows)) // 32) * 32
            ids_BT = np.full((height, width), _PAD, np.int32)
            for row, ids in zip(ids_BT, rows, strict=False):
                row[: len(ids)] = ids
            parts.append(np.asarray(_vectors(self._params, ids_BT, ids_BT != _PAD))[: len(rows)])
        return np.concatenate(parts)


def similarities(encoder: Encoder, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
    """Cosine of the two texts of each pair, `[N]`."""
    a_ND, b_ND = (encoder([pair[i] for pair in pairs]) for i in (0, 1))
    return (a_ND * b_ND).sum(-1)


@exact_jit
def _vectors(p: Mapping[str, Any], ids_BT: jax.Array, real_BT: jax.Array) -> jax.Array:
    T = ids_BT.shape[1]
    x_BTD = p["embeddings.word_embeddings.weight"][ids_BT]
    x_BTD += p["embeddings.position_embeddings.weight"][None, :T]
    x_BTD += p["embeddings.token_type_embeddings.weight"][None, :1]
    x_BTD = _norm(p, "embeddings.LayerNorm", x_BTD)
    for i in range(_LAYERS):
        layer = f"encoder.layer.{i}"
        q_BTNH, k_BTNH, v_BTNH = (
            x.reshape(*x.shape[:2], _HEADS, -1)
            for x in (
                _dense(p, f"{layer}.attention.self.{name}", x_BTD)
                for name in ("query", "key", "value")
            )
        )
        z_BTNH = jax.nn.dot_product_attention(
            q_BTNH, k_BTNH, v_BTNH, mask=real_BT[:, None, None, :]
        )
        out_BTD = _dense(p, f"{layer}.attention.output.dense", z_BTNH.reshape(x_BTD.shape))
        x_BTD = _norm(p, f"{layer}.attention.output.LayerNorm", x_BTD + out_BTD)
        up_BTF = _dense(p, f"{layer}.intermediate.dense", x_BTD)
        out_BTD = _dense(p, f"{layer}.output.dense", jax.nn.gelu(up_BTF, approximate=False))
        x_BTD = _norm(p, f"{layer}.output.LayerNorm", x_BTD + out_BTD)
    mean_BD = jnp.where(real_BT[..., None], x_BTD, 0.0).sum(1)
    return mean_BD / jnp.maximum(jnp.linalg.norm(mean_BD, axis=-1, keepdims=True), _EPSILON)


def _dense(p: Mapping[str, Any], name: str, x: jax.Array) -> jax.Array:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"][None, None]


def _norm(p: Mapping[str, Any], name: str, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + _EPSILON)
    return scaled * p[f"{name}.weight"][None, None] + p[f"{name}.bias"][None, None]
