"""Trained runs as models: folders that a training command wrote, read by the library it is of.

A run whose mixer is a library's own can only be read by that library, which this package and the
other libraries do not import. `iaj`, which may import all of them, registers their readers before
it runs a command (`iaj.run_readers`), so that `--config.model=RUN` may name a run there.
"""

from collections.abc import Callable
import dataclasses
import os
from pathlib import Path
import re
from typing import Any, Protocol

import jax

from lm_jax.errors import BadInputError
from lm_jax.model.config import DecoderConfig
from lm_jax.model.mixers import AttentionMixer, Mixer
from lm_jax.run.files import read_json
from lm_jax.run.identity import ModelIdentity
from lm_jax.run.workdir import CONFIG_FILE
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.weights.pretrained import Pretrained


class TrainedRun(Protocol):
    """A trained model with a mixer of its own, such as `protot_jax.load_run` gives.

    `params` is the tree of `param_spec(cfg, mixer)`; `sha256` stands for the checkpoint's content,
    `identity` for the whole model.
    """

    @property
    def params(self) -> dict[str, Any]: ...

    @property
    def cfg(self) -> DecoderConfig: ...

    @property
    def mixer(self) -> Mixer: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def sha256(self) -> str: ...

    @property
    def identity(self) -> ModelIdentity: ...


@dataclasses.dataclass(frozen=True)
class RunReader:
    """The runs of one library: whether a folder is one, and its model, sharded over a mesh."""

    holds: Callable[[Path], bool]
    read: Callable[[Path, jax.sharding.Mesh | None], TrainedRun]


_EXPORT, _CHECKPOINTS = "export.json", "checkpoints"
# Fields of the manifest of an export.
_OF_EXPORT = {"format", "files", "sha256", "step"}
_SEED = re.compile(r"seed_(\d+)")

_READERS: dict[str, RunReader] = {}


def register(library: str, reader: RunReader) -> None:
    """Makes the runs of a library readable in this process; a second call replaces its reader."""
    _READERS[library] = reader


def is_run(source: str | os.PathLike[str]) -> bool:
    """Whether a folder is a run of `iaj protot pretrain`, a seed's folder in it, or an export.

    It is for whoever must not take one for a pretrained model; no reader needs to be registered.
    """
    folder = Path(source)
    if (folder / CONFIG_FILE).is_file() and (folder / _EXPORT).is_file():
        manifest = read_json(folder / _EXPORT)
        # Other programs write files of this name too.
        if isinstance(manifest, dict) and manifest.keys() >= _OF_EXPORT:
            return True
    run = folder.parent if _SEED.fullmatch(folder.name) else folder
    return (run / CONFIG_FILE).is_file() and any(
        (each / _CHECKPOINTS).is_dir() and _SEED.fullmatch(each.name) for each in run.glob("seed_*")
    )


def softmax_run(
    source: str | os.PathLike[str], *, dtype: Any, mesh: jax.sharding.Mesh | None = None
) -> Pretrained | None:
    """The model of a run with softmax attention, as a pretrained one; None as of `read_run`.

    Raises:
      BadInputError: it has another mixer, and as `read_run`.
      CorruptError: as `read_run`.
    """
    run = read_run(source, mesh)
    if run is None:
        return None
    if not isinstance(run.mixer, AttentionMixer):
        raise BadInputError(
            f"{source} is a run with the mixer {type(run.mixer).__name__}; name one with softmax "
            "attention, such as llama_small"
        )
    params = jax.tree.map(lambda x: x.astype(dtype), run.params)
    return Pretrained(run.cfg, params, run.tokenizer, (), of_run=run.identity)


def read_run(
    source: str | os.PathLike[str], mesh: jax.sharding.Mesh | None = None
) -> TrainedRun | None:
    """The model of a run folder, or None where no registered library has written it.

    Raises:
      BadInputError, CorruptError: the run cannot be read, as its library says.
    """
    folder = Path(source)
    for reader in _READERS.values():
        if reader.holds(folder):
            return reader.read(folder, mesh)
    return None
