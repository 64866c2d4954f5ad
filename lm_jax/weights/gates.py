"""The gates of a sparse model on disk: `sparse.json` beside its weights.

An edge of a head is open where its score, or q.k with a raw gate, plus the bias of the head is
above 0. The library `sparse_jax` writes the file and computes the gates; what any library needs to
read one is here.
"""

from collections.abc import Mapping
import dataclasses
import os
from pathlib import Path
from typing import Any, TypeVar

from flax import struct
import numpy as np

from lm_jax.assets import published
from lm_jax.errors import BadInputError, CorruptError
from lm_jax.run.files import read_json
from lm_jax.run.identity import ModelIdentity, difference
from lm_jax.weights import hub
from lm_jax.weights.pretrained import OpenedModel, Pretrained

FORMAT = 2
Model = TypeVar("Model", bound=Pretrained | OpenedModel)


@struct.dataclass
class StoredGates:
    """Parameters of the gates of a model.

    A pytree of the bias: models that differ in it alone share compiled functions.

    Attributes:
      bias_LN: number added to the score of each head.
      raw_gate: whether the score is q.k without its scale.
      renormalise: whether the weights of the open edges are divided by their sum.
    """

    bias_LN: Any
    raw_gate: bool = struct.field(pytree_node=False, default=False)
    renormalise: bool = struct.field(pytree_node=False, default=False)


def has_gates(source: str | os.PathLike[str]) -> bool:
    """Whether a source is the folder, or the published name, of a sparse model."""
    return (published.resolve_model(source) / hub.GATES).is_file()


def read_note(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Contents of the `sparse.json` of a sparse model, without its weights.

    Raises:
      BadInputError: the folder is no sparse model, or one of another version.
      CorruptError: the file is damaged.
    """
    file = published.resolve_model(folder) / hub.GATES
    if not file.is_file():
        raise BadInputError(
            f"{folder} has no {hub.GATES}, so it is no sparse model; run posttrain"
            f"{published.hint(folder)}"
        )
    note = read_json(file)
    if note.get("format") != FORMAT:
        raise BadInputError(
            f"{file}: format {note.get('format')!r} is not {FORMAT}; export it again"
        )
    return note


def gates_of(note: Mapping[str, Any]) -> StoredGates:
    """The gates of a note, which nobody has compared with a model."""
    bias_LN = np.asarray(note["gate_bias"], np.float32)
    return StoredGates(bias_LN, note["raw_gate"], note["renormalise"])


def checked_gates(
    folder: Path, note: Mapping[str, Any], base: Pretrained | OpenedModel
) -> StoredGates:
    """The gates of a folder, if they belong to its weights.

    Args:
      folder: the folder.
      note: contents of its `sparse.json`.
      base: weights of the folder.

    Raises:
      BadInputError: they are of another family or shape.
      CorruptError: they were written for other weights.
    """
    gates, file = gates_of(note), folder / hub.GATES
    wanted, shape = (base.cfg.num_layers, base.cfg.num_heads), gates.bias_LN.shape
    if note["family"] != base.cfg.family or shape != wanted:
        raise BadInputError(
            f"{file} belongs to a model of family {note['family']} with (layers, heads) "
            f"{shape}, but the weights in its folder to {base.cfg.family} with {wanted}; "
            "copy the whole folder"
        )
    recorded = note.get("identity", note["weights_sha256"])
    if change := difference(recorded, base.identity.text, where=file):
        raise CorruptError(
            f"{folder}: the model is not the one that {hub.GATES} was written for ({change}); copy "
            "the whole folder"
        )
    return gates


def identity(base: Pretrained | OpenedModel, gates: StoredGates) -> ModelIdentity:
    """The identity of a model with gates."""
    return with_gates(base, gates).identity


def with_gates(base: Model, gates: StoredGates) -> Model:
    """The model, whose identity is then of its gates too; its parameters stay as they are."""
    settings = [np.asarray(gates.bias_LN).tolist(), gates.raw_gate, gates.renormalise]
    return dataclasses.replace(base, others=(*base.others, settings))
