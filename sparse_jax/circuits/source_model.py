"""A model that an analysis reads, by name or folder: dense, sparse with its gates, or a run."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lm_jax.assets import published
from lm_jax.errors import BadInputError, UsageError
from lm_jax.model.config import DecoderConfig
from lm_jax.run.identity import ModelIdentity
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.weights.load import load_pretrained, open_pretrained
from lm_jax.weights.runs import read_run
from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.gates import model as sparse_model

# The folder of the exported model in that of a training.
_MODEL = "model"
_NO_NAME = "config.model is empty; name a folder or a model of iaj fetch --list"


@dataclasses.dataclass(frozen=True)
class SourceModel:
    """A model with MLPs and a tokenizer, and which one it is.

    `sha256` is the digest of its weights; `revision` is the commit of a snapshot of the Hugging
    Face hub, None for any other source.
    """

    name: str
    model: CircuitModel
    tokenizer: Tokenizer
    sha256: str
    identity: ModelIdentity
    revision: str | None = None

    @classmethod
    def load(
        cls,
        source: str,
        *,
        dtype: str = "float32",
        mesh: jax.sharding.Mesh | None = None,
        without_mlps: bool = False,
    ) -> "SourceModel":
        """Reads a dense model, a sparse one with its gates, or a trained run (`weights.runs`).

        Args:
          source: what `lm_jax.load_pretrained` takes, the folder or published name of a sparse
            model or of a trained run, or the work folder of a training that exported a model.
          dtype: dtype of the weights.
          mesh: the mesh to put them on.
          without_mlps: whether a model that has none will do.

        Raises:
          UsageError: no model is named.
          BadInputError: there is no such model, or it has no tokenizer or no MLP.
        """
        if not source:
            raise UsageError(_NO_NAME)
        folder, revision = _folder(source), None
        if (folder / sparse_model.SPARSE).is_file():
            loaded = sparse_model.load(folder, dtype=jnp.dtype(dtype), mesh=mesh)
            model, base, identity = CircuitModel.of(loaded), loaded.base, loaded.identity
        elif base := read_run(folder, mesh):
            model, identity = CircuitModel.of(base), base.identity
            params = jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), model.params)
            model = dataclasses.replace(model, params=params)
        else:
            named = folder if folder.exists() else source
            base = load_pretrained(named, dtype=jnp.dtype(dtype), mesh=mesh)
            model, identity, revision = CircuitModel.of(base), base.identity, base.revision
        if base.tokenizer is None:
            raise BadInputError(
                f"model {source!r} has no tokenizer; put its tokenizer.json beside the weights"
            )
        if not base.cfg.mlp_size and not without_mlps:
            raise BadInputError(f"model {source!r} has no MLPs that a transcoder could stand for")
        return cls(source, model, base.tokenizer, base.sha256, identity, revision)


class OpenedSource(NamedTuple):
    """Which model a source is, and the config of its decoder."""

    identity: ModelIdentity
    cfg: DecoderConfig


def open_source(source: str | Path) -> OpenedSource:
    """What `SourceModel.load` would read; the weights are loaded of a run alone.

    Raises:
      UsageError, BadInputError, CorruptError: as `SourceModel.load`.
    """
    if not str(source):
        raise UsageError(_NO_NAME)
    folder = _folder(source)
    if (folder / sparse_model.SPARSE).is_file():
        opened = open_pretrained(folder, without_gates=True)
        return OpenedSource(sparse_model.open_identity(folder), opened.cfg)
    if run := read_run(folder):
        return OpenedSource(run.identity, run.cfg)
    opened = open_pretrained(folder if folder.exists() else source)
    return OpenedSource(opened.identity, opened.cfg)


def open_identity(source: str | Path) -> ModelIdentity:
    """The identity of a model that `SourceModel.load` reads, as `open_source` reads it."""
    return open_source(source).identity


def _folder(source: str | Path) -> Path:
    """The folder of a model that is published or in the work folder of a training."""
    folder = published.resolve_model(source)
    return folder / _MODEL if (folder / _MODEL / "config.json").is_file() else folder
