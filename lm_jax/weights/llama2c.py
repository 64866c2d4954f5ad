"""Checkpoints of llama2.c: a Llama of float32 in one file, with its tokenizer in the same.

    int32 [7]      width, width of the MLP, layers, heads, key and value heads, tokens, context;
                   tokens are negative where the unembedding is a matrix of its own
    float32        token embedding, then by kind, each for all layers: norms before attention, q, k,
                   v, o, norms before the MLP, gate, down, up; last norm; cosines and sines, which
                   are computed here; the unembedding, if any
    the tokenizer  int32 length of the longest piece, then for each piece a float32 score, an int32
                   length and its bytes

A checkpoint alone, whose tokenizer is a file of its own, is read with `tokenizer.bin` beside it.
Rotations are of neighbouring pairs, as in GGUF.
"""

import math
from pathlib import Path
import struct

import numpy as np

from lm_jax.errors import BadInputError
from lm_jax.model.config import DecoderConfig
from lm_jax.model.rope import Rope
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.weights.gguf.architectures import halves

SUFFIXES = (".bin", ".data")
_HEADER = struct.Struct("<7i")
_PIECE = struct.Struct("<fi")
_TOKENIZER = "tokenizer.bin"
# What every vocabulary of SentencePiece with byte fallback begins with.
_FIRST = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)))
# More than any model has; a file of another kind has larger numbers at its beginning.
_MOST = 2**24


class Llama2cSource:
    """The weights of one checkpoint under the names of the family; `cfg` is the decoder.

    Raises:
      BadInputError: the file is no such checkpoint, or shorter than its header says.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            head = file.read(_HEADER.size)
        numbers = _HEADER.unpack(head) if len(head) == _HEADER.size else (0,) * 7
        width, mlp, layers, heads, kv_heads, tokens, context = numbers
        positive = (width, mlp, layers, heads, kv_heads, abs(tokens), context)
        whole = all(0 < each < _MOST for each in positive)
        if not whole or width % (2 * heads) or heads % kv_heads:
            raise BadInputError(
                f"{path} is neither a Hugging Face folder nor a .gguf file nor a checkpoint of "
                "llama2.c, which begins with seven sizes; name one"
            )
        self.path = path
        self.cfg = DecoderConfig(
            family="llama",
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=width // heads,
            hidden_size=width,
            mlp_size=mlp,
            vocab_size=abs(tokens),
            max_length=context,
            norm_eps=1e-5,
            rope=Rope(theta=10_000.0),
            tie_embeddings=tokens > 0,
        )
        self._places, self._end = _places(self.cfg)
        if path.stat().st_size < self._end:
            raise BadInputError(
                f"{path} has {path.stat().st_size:,} bytes, and weights of its sizes have "
                f"{self._end:,}; fetch the file again"
            )

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer at the end of the file, or in `tokenizer.bin`; None where there is none.

        Raises:
          BadInputError: it is cut off, or has other tokens than the model.
        """
        file, start = self.path, self._end
        if self.path.stat().st_size == self._end:
            file, start = self.path.with_name(_TOKENIZER), 0
            if not file.is_file():
                return None
        data = file.read_bytes()[start:]
        pieces, scores, at = [], [], 4
        for _ in range(self.cfg.vocab_size):
            whole = at + _PIECE.size <= len(data)
            score, length = _PIECE.unpack_from(data, at) if whole else (0.0, 0)
            at += _PIECE.size
            if length < 0 or at + length > len(data):
                raise BadInputError(
                    f"{file}: the tokenizer has {len(pieces):,} pieces, and the model "
                    f"{self.cfg.vocab_size:,} tokens; fetch the file again"
                )
            scores.append(score)
            pieces.append(data[at : at + length].decode("utf-8", "replace").replace(" ", "▁"))
            at += length
        # Pieces are stored as they are printed, and some writers print bytes as characters.
        pieces[: len(_FIRST)] = _FIRST
        return Tokenizer.from_pieces(pieces, scores)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight."""
        return {name: shape for name, (shape, _) in self._places.items()}

    def read(self, name: str) -> np.ndarray:
        """One weight, float32, in the layout of a Hugging Face folder."""
        shape, start = self._places[name]
        w = np.memmap(self.path, "<f4", "r", start, shape)
        rotated = name.endswith(("q_proj.weight", "k_proj.weight"))
        return halves(np.array(w), self.cfg) if rotated else np.array(w)


def _places(cfg: DecoderConfig) -> tuple[dict[str, tuple[tuple[int, ...], int]], int]:
    """Shape and first byte of each weight by its name, and the byte after all arrays."""
    D, F, T = cfg.hidden_size, cfg.mlp_size, cfg.max_length
    queries, keys = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    by_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (D,),
        "self_attn.q_proj": (queries, D),
        "self_attn.k_proj": (keys, D),
        "self_attn.v_proj": (keys, D),
        "self_attn.o_proj": (D, queries),
        "post_attention_layernorm": (D,),
        "mlp.gate_proj": (F, D),
        "mlp.down_proj": (D, F),
        "mlp.up_proj": (F, D),
    }
    rotations = T * cfg.head_dim
    order = [("model.embed_tokens", (cfg.vocab_size, D))]
    for name, shape in by_layer.items():
        order += [(f"model.layers.{layer}.{name}", shape) for layer in range(cfg.num_layers)]
    order += [("model.norm", (D,)), ("", (rotations,))]
    if not cfg.tie_embeddings:
        order.append(("lm_head", (cfg.vocab_size, D)))
    places, at = {}, _HEADER.size
    for name, shape in order:
        if name:
            places[f"{name}.weight"] = (shape, at)
        at += 4 * math.prod(shape)
    return places, at
