"""Pretrained weights: Hugging Face folders, hub ids, GGUF files, our checkpoints, manifest names.

The config is read first, and names the family (`FAMILIES`) whose table says what is where
(`lm_jax.weights.fill`).
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from pathlib import Path
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp

from lm_jax.checkpoint.folder import (
    ARRAYS,
    MANIFEST,
    array_files,
    load_arrays,
    verify_checkpoint,
)
from lm_jax.errors import BadInputError, UsageError, nearest
from lm_jax.model import decoder
from lm_jax.model.config import DecoderConfig
from lm_jax.parallel import sharding
from lm_jax.run import downloads
from lm_jax.run.config import from_plain
from lm_jax.run.files import read_json
from lm_jax.run.identity import ModelIdentity
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.weights import card as cards
from lm_jax.weights import hub, llama2c, peft_settings, runs
from lm_jax.weights.families import FAMILIES
from lm_jax.weights.fill import load_params
from lm_jax.weights.pretrained import OpenedModel, Pretrained
from lm_jax.weights.safetensors import CONFIG, SafetensorsSource, read_family, read_hf_config

# Added tokens that an embedding may lack: more are another model's.
_MOST_SURPLUS = 64
_LACKS_GATES = (
    "{path} has the weights of a sparse model, but not its gates, "
    f"{hub.GATES}: without them they are another model; copy the whole folder, or fetch the file "
    "with --download (download=True)"
)


def load_pretrained(
    source: str | Path,
    *,
    dtype: Any = jnp.float32,
    mesh: jax.sharding.Mesh | None = None,
    download: bool = False,
    without_gates: bool = False,
) -> Pretrained:
    """Loads a pretrained model: config, weights and tokenizer.

    Args:
      source: a Hugging Face folder, a `.gguf` file, a checkpoint of llama2.c, a folder made by
        `iaj convert`, a folder of PEFT whose base is at hand (`lm_jax.weights.adapted`), a name in
        the manifest (`lm_jax.assets`) or of a published model (`lm_jax.assets.published`), or
        `ORG/NAME` or `ORG/NAME@REVISION` of the Hugging Face hub.
      dtype: dtype of the parameters, float32 or bfloat16.
      mesh: the mesh to put them on, sharded by `sharding.RULES`; None is the default device.
      download: whether to fetch what the hub's cache lacks; without it nothing is ever fetched.
      without_gates: whether to read the weights of a folder whose attention has gates
        (`hub.GATES`), which the caller applies. Without their gates they are another model, so it
        is refused.

    Raises:
      BadInputError: if there is no such source, its family or a setting is not supported, any
        tensor is missing, unused, misshapen or not finite (all listed at once), it has gates, or
        it is a trained run of another library.
      CorruptError: if a converted folder does not match its manifest.
      StorageError: if a download cannot be written.
      UsageError: for another dtype.
    """
    opened = open_pretrained(source, download=download, without_gates=without_gates)
    return opened.load(dtype=dtype, mesh=mesh)


def open_pretrained(
    source: str | Path, *, download: bool = False, without_gates: bool = False
) -> OpenedModel:
    """Reads config and tokenizer of a model, so that they can be checked before its weights.

    Args:
      source, download, without_gates: the arguments of `load_pretrained`.

    Raises:
      BadInputError: if there is no such source, its family or a setting is not supported, its
        tokenizer has ids beyond its embedding that are not a few added tokens, it has gates, or it
        is a trained run.
      CorruptError: if a converted folder does not match its manifest.
      StorageError: if a download cannot be written.
    """
    with downloads.allowed(download):
        path = resolve(source)
    _check_whole_model(path, without_gates)
    if (path / MANIFEST).exists() or (path / ARRAYS).is_dir():
        opened = _open_converted(path)
    elif peft_settings.is_peft(path):
        opened = _open_adapted(path, download, without_gates)
    elif path.is_dir():
        opened = _open_folder(path, without_gates)
    elif path.suffix == ".gguf":
        opened = _open_gguf(path)
    elif path.suffix in llama2c.SUFFIXES:
        opened = _open_llama2c(path)
    else:
        raise BadInputError(f"{path} is neither a Hugging Face folder nor a .gguf file; name one")
    return dataclasses.replace(opened, tokenizer=_fitted(path, opened.tokenizer, opened.cfg))


def _check_whole_model(path: Path, without_gates: bool) -> None:
    """Refuses a folder whose weights alone are not the model that it holds."""
    if (path / hub.GATES).is_file() and not without_gates:
        raise BadInputError(
            f"{path} is a sparse model, whose gates are in {hub.GATES} and are not applied here: "
            "without them its weights are another model; read it with sparse_jax.load, or name it "
            "in a command of iaj sparse that takes one (circuits, graph, transcoder, choices "
            "--config.sparse)"
        )
    if runs.is_run(path):
        raise BadInputError(
            f"{path} is a run or an export of iaj protot, which is not read here; read it with "
            "protot_jax.load_run, with --run of the commands of iaj protot, or with --config.model "
            "of iaj sparse transcoder and graph"
        )


def _open_folder(path: Path, without_gates: bool) -> OpenedModel:
    family, raw = read_family(path, FAMILIES)
    if not without_gates and (hub.GATES_FIELD in raw or cards.is_of_sparse(path)):
        raise BadInputError(_LACKS_GATES.format(path=path))
    weights = SafetensorsSource(path, family)
    cfg = family.read_config(read_hf_config(path, family, raw, len(weights.shapes())))
    read = functools.partial(load_params, weights, cfg)
    return OpenedModel(cfg, _tokenizer_in(path), weights.files, read, hub.revision(path))


def _open_adapted(path: Path, download: bool, without_gates: bool) -> OpenedModel:
    from lm_jax.weights.adapted import open_adapted

    if not without_gates and cards.is_of_sparse(path):
        raise BadInputError(_LACKS_GATES.format(path=path))
    opened = open_adapted(path, functools.partial(open_pretrained, download=download))
    own = _tokenizer_in(path)
    return opened if own is None else dataclasses.replace(opened, tokenizer=own)


def _open_gguf(path: Path) -> OpenedModel:
    from lm_jax.weights.gguf import GGUFSource

    weights = GGUFSource(path)
    read = functools.partial(load_params, weights, weights.cfg)
    return OpenedModel(weights.cfg, weights.tokenizer(), (path,), read)


def _open_llama2c(path: Path) -> OpenedModel:
    weights = llama2c.Llama2cSource(path)
    read = functools.partial(load_params, weights, weights.cfg)
    return OpenedModel(weights.cfg, weights.tokenizer(), (path,), read)


def _open_converted(path: Path) -> OpenedModel:
    manifest = verify_checkpoint(path)
    stored = read_json(path / CONFIG)
    try:
        cfg = from_plain(stored, DecoderConfig)
    except UsageError as error:
        raise BadInputError(f"{path / CONFIG}: {error}; convert the model again") from error

    def read(*, dtype: Any, mesh: jax.sharding.Mesh | None) -> dict[str, Any]:
        target = sharding.abstract(decoder.param_spec(cfg), dtype, mesh)
        return load_arrays(path, manifest, target, cast=True)

    return OpenedModel(cfg, _tokenizer_in(path), array_files(path, manifest), read)


def _tokenizer_in(path: Path) -> Tokenizer | None:
    return Tokenizer.from_folder(path) if (path / "tokenizer.json").exists() else None


def _fitted(path: Path, tokenizer: Tokenizer | None, cfg: DecoderConfig) -> Tokenizer | None:
    """The tokenizer, which refuses texts with tokens that have no row in the embedding.

    A model that was fine-tuned with a token for padding alone, `<pad>`, often has such: at most
    `_MOST_SURPLUS`, all of them added to the vocabulary, and none that begins or ends a text. They
    are warned of. Other ids beyond the embedding show that the tokenizer is of another model.

    Raises:
      BadInputError: there are other ids beyond the embedding.
    """
    if tokenizer is None:
        return None
    # A vocabulary may have holes: the ids count, not the number of tokens.
    names = {i: name for name, i in tokenizer.backend.get_vocab(with_added_tokens=True).items()}
    surplus = sorted(i for i in names if i >= cfg.vocab_size)
    if not surplus:
        return tokenizer
    added = tokenizer.backend.get_added_tokens_decoder().keys()
    if len(surplus) > _MOST_SURPLUS or not added >= set(surplus):
        raise BadInputError(
            f"{path}: the tokenizer has ids up to {surplus[-1]}, but the embedding only "
            f"{cfg.vocab_size} rows; use the tokenizer that belongs to these weights"
        )
    for kind, i in (("begins", tokenizer.bos_id), ("ends", tokenizer.eos_id)):
        if i in surplus:
            raise BadInputError(
                f"{path}: the token {names[i]!r}, which {kind} a text, has the id {i}, but the "
                f"embedding only {cfg.vocab_size} rows; use the tokenizer that belongs to these "
                "weights"
            )
    logging.warning(
        "%s: no row in the embedding for %s; a text with such a token is refused",
        path,
        ", ".join(repr(names[i]) for i in surplus),
    )
    # The model can never give the others.
    stops = tuple(i for i in tokenizer.other_stop_ids if i < cfg.vocab_size)
    return dataclasses.replace(tokenizer, embedding_rows=cfg.vocab_size, other_stop_ids=stops)


def resolve(source: str | Path) -> Path:
    """A path as it is; a name of `iaj fetch --list` or a hub id as the file or folder of it.

    Raises:
      BadInputError: there is no such source here, or its download was asked for and failed.
      StorageError: the download cannot be written.
    """
    path, name = Path(source), str(source)
    if path.exists():
        return path
    from lm_jax import assets
    from lm_jax.assets import published

    models = assets.models()
    if name in models:
        return assets.path(name, models[name])
    if name in published.names():
        return published.resolve_model(name)
    known = [*models, *published.names()]
    if folder := hub.find(name):
        return folder
    remedy = nearest(name, known)
    if hub.NAME.fullmatch(name):
        remedy += "; --download (download=True) fetches it from the Hugging Face hub"
    raise BadInputError(
        f"model {name!r} is no folder or .gguf file, no ORG/NAME[@REVISION] that is whole in the "
        f"hub's cache {hub.cache()}, and no name in the manifest{remedy}"
    )


def identities(
    sources: Mapping[str, str], read: Callable[[str], ModelIdentity] | None = None
) -> dict[str, str]:
    """`ModelIdentity.text` of models by name, without their weights; one that is gone is left out.

    What was made from a model that is no longer there can be shown (`finished.finish_time` says
    that it is not compared), and nothing new can be made from it.

    Args:
      sources: sources of the models by name, as `load_pretrained` takes them.
      read: the identity of a source; None for that of `open_pretrained`.

    Raises:
      BadInputError, CorruptError: a model is there and cannot be read.
    """
    read = read or (lambda source: open_pretrained(source).identity)
    return {name: read(source).text for name, source in sources.items() if is_there(source)}


def is_there(source: str | Path) -> bool:
    """Whether there is such a source, as `load_pretrained` takes it."""
    try:
        resolve(source)
    except BadInputError:
        return False
    return True
