"""GGUF files: dequantised through the `gguf` package and presented under Hugging Face names.

What differs by architecture is in `gguf_architectures`. Every field of the architecture is read or
known to change nothing; any other is refused.
"""

from collections.abc import Callable
import dataclasses
from pathlib import Path
import re
from typing import Any

from absl import logging
import numpy as np

from lm_jax.errors import BadInputError, nearest
from lm_jax.model.config import DecoderConfig
from lm_jax.text import gguf_tokenizer
from lm_jax.text.gguf_reader import contents, open_gguf
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.weights.gguf import fields as gguf_fields
from lm_jax.weights.gguf.architectures import ARCHITECTURES

_NO_TOKENIZER = (
    "%s: the weights are read without a tokenizer (%s); give the model that of its Hugging Face "
    "folder by dataclasses.replace(model, tokenizer=Tokenizer.from_folder(FOLDER)), or convert the "
    "file with iaj convert and copy tokenizer.json and tokenizer_config.json into what it writes"
)


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor of the file, or one row of it, and what takes it back to Hugging Face's layout."""

    stored: Any
    undo: Callable[[np.ndarray, DecoderConfig], np.ndarray] | None
    transposed: bool
    row: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        shape = gguf_fields.shape(self.stored)
        if self.row is not None:
            return shape[1:]
        return shape[::-1] if self.transposed else shape


class GGUFSource:
    """The weights of one GGUF file under the names of its family's table; `cfg` is the decoder."""

    def __init__(self, path: Path):
        self._path, self._reader = path, open_gguf(path)
        fields = self._reader.fields
        if "split.count" in fields and contents(fields["split.count"]) > 1:
            raise BadInputError(
                f"{path} is one part of a split GGUF file; join the parts with gguf-split --merge"
            )
        named = fields.get("general.architecture")
        kind = "" if named is None else str(contents(named))
        if kind not in ARCHITECTURES:
            raise BadInputError(
                f"{path}: GGUF architecture {kind!r} is not supported{nearest(kind, ARCHITECTURES)}"
            )
        self._architecture = ARCHITECTURES[kind]
        tensors = {t.name: t for t in self._reader.tensors}
        settings = gguf_fields.Fields(path, kind, fields)
        if settings.number("block_count") > len(tensors):
            settings.refuse("block_count", f"is absurd for a file of {len(tensors)} tensors")
        self.cfg = self._architecture.config(settings, tensors)
        self._tensors = dict(
            named
            for name, tensor in tensors.items()
            if name not in self._architecture.settings
            for named in self._named(name, tensor)
        )

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer in the file; None, with a warning, where its rules are not known."""
        if reason := gguf_tokenizer.unknown(gguf_tokenizer.Fields(self._reader)):
            logging.warning(_NO_TOKENIZER, self._path, reason)
            return None
        return Tokenizer.from_gguf(self._reader)

    def _named(self, name: str, stored: Any) -> list[tuple[str, _Tensor]]:
        """A tensor of the file under its name in the table, or its rows under one name each."""
        architecture = self._architecture
        block = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        stem, dot, suffix = (block[2] if block else name).rpartition(".")
        prefix = f"{architecture.block}{block[1]}." if block else ""
        if stem in architecture.by_head:
            names = prefix + architecture.by_head[stem] + dot + suffix
            return [
                (names.replace("{n}", str(n)), _Tensor(stored, None, False, row=n))
                for n in range(gguf_fields.shape(stored)[0])
            ]
        # A name outside the table is kept, so that the check of the table reports it.
        suffixed = "" if stem in architecture.bare else dot + suffix
        renamed = architecture.names.get(stem, stem) + suffixed
        tensor = _Tensor(
            stored,
            architecture.undo.get(stem),
            stem in architecture.transposed and suffix == "weight",
        )
        return [(prefix + renamed, tensor)]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """One weight, float32, in the layout of the Hugging Face folder."""
        tensor = self._tensors[name]
        w = gguf_fields.dequantised(tensor.stored)
        if tensor.row is not None:
            return w[tensor.row]
        w = w.T if tensor.transposed else w
        return w if tensor.undo is None else tensor.undo(w, self.cfg)
