"""Loading a pretraining run from its work folder: model, data and checkpoints.

The work folder has `data/`, the prepared corpus, and a folder of checkpoints per seed. A model is
built from the run's config, and its parameters are loaded from a checkpoint, or from the one file
of an exported model (`protot_jax.training.export`).
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import os
from pathlib import Path
import re
from typing import Any, TypeVar

from absl import logging
import jax

from lm_jax.assets import published
from lm_jax.checkpoint import manager
from lm_jax.checkpoint.folder import MANIFEST, verify_checkpoint
from lm_jax.errors import BadInputError, UsageError
from lm_jax.inspect.run import Run, Subject
from lm_jax.inspect.run import run as run_subject
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import count_params, param_spec
from lm_jax.model.mixers import Mixer
from lm_jax.model.sites import Reducer
from lm_jax.parallel import sharding
from lm_jax.run.config import from_plain
from lm_jax.run.files import file_digest, read_json
from lm_jax.run.identity import ModelIdentity
from lm_jax.run.workdir import CONFIG_FILE
from lm_jax.text.examples import Examples, Mode
from lm_jax.text.preparation import prepare_on_first
from lm_jax.text.prepared import Prepared
from lm_jax.text.splits import SPLITS
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.text.tokenizer_training import END_OF_TEXT
from lm_jax.train.objective import MakeBatch, PackedBatch, next_token_batch
from lm_jax.weights.identity import identify
from protot_jax.mixers import models
from protot_jax.mixers.prototypes import PrototypeMixer
from protot_jax.mixers.reference_code import released_prefix_mean
from protot_jax.training.config import PretrainConfig
from protot_jax.training.exported import FORMAT, is_exported, read_manifest, read_weights

DATA = "data"
T = TypeVar("T")


def model(config: PretrainConfig, vocab_size: int) -> tuple[DecoderConfig, Mixer]:
    """Builds the decoder config and the mixer of a pretraining config."""
    options: dict[str, Any] = {}
    if config.model == "protot":
        options |= dataclasses.asdict(config.prototypes)
        if config.arithmetic == "released":
            options["prefix"] = released_prefix_mean
    elif config.model == "llama":
        options["pattern_dropout"] = config.attention_dropout
    return models.build_model(
        config.model,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        vocab_size=vocab_size,
        context=config.context,
        tie_embeddings=config.tie_embeddings,
        **options,
    )


@dataclasses.dataclass(frozen=True)
class Data:
    """The three splits of a corpus as examples of one context."""

    prepared: Prepared
    train: Examples
    validation: Examples
    test: Examples


def load_data(config: PretrainConfig, folder: Path) -> Data:
    """Opens the prepared corpus in `folder`, or prepares it there.

    A split that has fewer documents than its limit is used whole, with a warning.
    """
    prepared = prepare_on_first(folder, config.corpus)
    split = functools.partial(Examples, prepared, context=config.context, mode=layout(config))
    examples = []
    for name in SPLITS:
        limit = getattr(config, f"{name}_documents")
        examples.append(split(name, limit=limit or None))
        if examples[-1].documents < limit:
            logging.warning(
                "the %s split has %s documents, fewer than config.%s_documents = %s; all are used",
                *(name, f"{examples[-1].documents:,}", name, f"{limit:,}"),
            )
    return Data(prepared, *examples)


def layout(config: PretrainConfig) -> Mode:
    """How the rows of a run are cut from its documents."""
    return "truncate" if config.examples == "truncate" else "pack"


def batch_maker(config: PretrainConfig, tokenizer: Tokenizer) -> MakeBatch:
    """What makes inputs, targets and masks of the rows of a run."""
    if config.examples != "pack":
        return next_token_batch
    end = tokenizer.backend.token_to_id(END_OF_TEXT)
    if end is None:
        raise BadInputError(
            f"the tokenizer has no {END_OF_TEXT}, by which packed documents are told apart; choose "
            "config.examples = 'truncate'"
        )
    return PackedBatch(end)


def seed_folder(folder: Path, seed: int) -> Path:
    """The folder of one seed of the run in `folder`."""
    return folder / f"seed_{seed}"


def split_seed(folder: Path) -> tuple[Path, int | None]:
    """A run's folder and None, or the run's folder and the seed of the folder of one seed.

    A published model may be given by its name.

    An exported model is a whole run, whatever its folder is called.
    """
    folder = published.resolve(folder)
    seed = None if is_exported(folder) else re.fullmatch(r"seed_(\d+)", folder.name)
    return (folder.parent, int(seed[1])) if seed else (folder, None)


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A pretrained model: the parameters after `step` updates, their architecture and config.

    `sha256` is that of the manifest of the checkpoint, or of the exported model, which has the
    digests of its files; `checkpoint_sha256` is that of the checkpoint for both, so that a run and
    its export are known for one model. Both are empty for a model that was not loaded.
    """

    cfg: DecoderConfig
    mixer: Mixer
    params: dict[str, Any]
    tokenizer: Tokenizer
    config: PretrainConfig
    seed: int
    step: int
    sha256: str = ""
    checkpoint_sha256: str = ""

    def __repr__(self) -> str:
        """Model, sizes, seed and step, without the weights."""
        model = self.config.model
        if isinstance(self.mixer, PrototypeMixer):
            model += f" with {self.mixer.num_prototypes} prototypes a layer"
        return f"TrainedModel({model}: {self.cfg.sizes}; seed {self.seed}, step {self.step:,})"

    @functools.cached_property
    def identity(self) -> ModelIdentity:
        """Digests of the model's parts; an export has another identity than its run."""
        return identify(self.cfg, self.tokenizer, self.sha256, self.mixer)

    def run(
        self, text: Any, *, record: Sequence[str] | Mapping[str, Reducer] = (), edits: Any = None
    ) -> Run:
        """Runs the model on a text, on ids, or on several; see `lm_jax.Pretrained.run`."""
        subject = Subject(self.params, self.cfg, self.tokenizer, mixer=self.mixer)
        return run_subject(subject, text, record=record, edits=edits)

    @property
    def prototypes(self) -> PrototypeMixer:
        """The mixer of a model that has prototypes.

        Raises:
          UsageError: it has none.
        """
        if not isinstance(self.mixer, PrototypeMixer):
            raise UsageError(
                f"the run trained {self.config.model!r}, which has no prototypes; name a run of "
                "'protot'"
            )
        return self.mixer

    def described(self, cls: type[T], **more: Any) -> T:
        """The model as one of the dataclasses of the studies' results.

        Args:
          cls: a dataclass, whose fields may be any of `seed`, `step`, `sha256`, `kind`, `corpus`,
            `layers`, `hidden_size`, `vocab_size`, `context` and `parameters`, and `prototypes`,
            `shared_routing` and `heads` of a model that has prototypes.
          **more: values of its other fields.
        """
        cfg, mixer = self.cfg, self.mixer
        facts = {
            "seed": self.seed,
            "step": self.step,
            "sha256": self.sha256,
            "kind": self.config.model,
            "corpus": self.config.corpus.source,
            "layers": cfg.num_layers,
            "hidden_size": cfg.hidden_size,
            "vocab_size": cfg.vocab_size,
            "context": cfg.max_length,
            "parameters": count_params(cfg, mixer=mixer),
            "prototypes": None,
        }
        if isinstance(mixer, PrototypeMixer):
            facts |= {
                "prototypes": mixer.num_prototypes,
                "shared_routing": mixer.shared_routing,
                "heads": mixer.heads,
            }
        own: Any = cls
        named = [field.name for field in dataclasses.fields(own) if field.name not in more]
        return cls(**{name: facts[name] for name in named if name in facts}, **more)

    def warn_of_joining(self) -> None:
        """Logs a warning if the model was trained on joined rows, and few beginnings of texts."""
        if self.config.examples == "join":
            logging.warning(
                "this model was trained on documents joined into rows (config.examples = 'join'); "
                "it is analysed here at beginnings of texts, which are rare in its training data"
            )


def load_run(
    run: str | os.PathLike[str],
    *,
    seed: int | None = None,
    best: bool = True,
    mesh: jax.sharding.Mesh | None = None,
) -> TrainedModel:
    """Loads a model that `iaj protot pretrain` trained, from its work folder or an export.

    Args:
      run: the work folder, a folder of `protot_jax.training.export`, or the name of a published
        model, such as `protot_whole`.
      seed: one of the run's seeds; None for the first.
      best: the checkpoint of lowest validation perplexity so far; false for the last one.
      mesh: the mesh to put the parameters on; None is the default device.

    Raises:
      BadInputError: the folder has no such run, or no checkpoint yet.
      CorruptError: a checkpoint, the tokenizer's folder or an exported model is damaged.
      UsageError: a seed that the run does not have, or weights that were not exported.
    """
    folder = published.resolve(run)
    opened = open_run(folder, seed=seed, best=best)
    wanted = sharding.abstract(param_spec(opened.cfg, opened.mixer), mesh=mesh)
    if is_exported(folder):
        params = read_weights(folder, wanted)
    else:
        saved = seed_folder(folder, opened.seed) / manager.FOLDER
        params = manager.load_params(saved, opened.step, wanted)
    return dataclasses.replace(opened, params=params)


def open_run(
    run: str | os.PathLike[str], *, seed: int | None = None, best: bool = True
) -> TrainedModel:
    """The model that `load_run` loads without its weights: `params` is empty.

    Raises:
      BadInputError, CorruptError, UsageError: as `load_run`, but damaged weights are not found.
    """
    folder = published.resolve(run)
    if not (folder / CONFIG_FILE).is_file():
        raise BadInputError(
            f"{folder} is no run: it has no {CONFIG_FILE}; name a work folder"
            f"{published.hint(folder)}"
        )
    # A changed file of an export is named as that, and not as settings that cannot be.
    manifest = read_manifest(folder, best=best) if is_exported(folder) else None
    stored = read_json(folder / CONFIG_FILE)
    _check_is_run(folder, stored)
    config = from_plain(stored, PretrainConfig)
    seed = config.seeds[0] if seed is None else seed
    if seed not in config.seeds:
        raise UsageError(f"seed = {seed} is none of {', '.join(map(str, config.seeds))}")
    saved = seed_folder(folder, seed) / manager.FOLDER
    tokenizer = Tokenizer.from_folder(folder / DATA)
    cfg, mixer = model(config, tokenizer.vocab_size)
    if manifest is not None:
        step, own = manifest["step"], manifest["provenance"]["data"]["checkpoint"]
        digest = file_digest(folder / FORMAT.name)["sha256"]
    else:
        step = _saved_step(saved, best=best)
        digest = own = file_digest(manager.step_folder(saved, step) / MANIFEST)["sha256"]
    return TrainedModel(cfg, mixer, {}, tokenizer, config, seed, step, digest, own)


def _check_is_run(folder: Path, stored: Any) -> None:
    """Refuses a folder of something else in a sentence, in place of a list of unknown fields."""
    names = stored.keys() if isinstance(stored, dict) else set()
    if names & {"corpus", "seeds"}:
        return
    what = "no run of iaj protot pretrain"
    if "model_type" in names:
        what = f"a Hugging Face model ({stored['model_type']}), not a run of iaj protot pretrain"
    raise BadInputError(
        f"{folder} is {what}; name the --workdir of iaj protot pretrain, or an export of it, such "
        "as models/protot_whole"
    )


def _saved_step(saved: Path, *, best: bool) -> int:
    """The step of the checkpoint that is wanted, among those of one seed."""
    steps = manager.saved_steps(saved)
    if not steps:
        raise BadInputError(f"{saved} has no checkpoint; start the run again to resume")
    if not best:
        return steps[-1]
    notes = verify_checkpoint(manager.step_folder(saved, steps[-1]))["notes"]
    return notes["progress"].get("best_step") or steps[-1]


def run_names(folders: Sequence[Path], models: Sequence[TrainedModel]) -> list[str]:
    """Names the runs of a report: a run of a study by its variant, another by its kind of model.

    Where two models would then have the same name and seed, names have the run's folder too.

    Args:
      folders: work folder of each run.
      models: the model that was loaded from each.
    """
    kinds = [
        study_variant(folder) or own.config.model
        for folder, own in zip(folders, models, strict=True)
    ]
    places = [folder.resolve() for folder in folders]
    for ending in ([""] * len(kinds), [f" ({place.name})" for place in places]):
        names = [kind + end for kind, end in zip(kinds, ending, strict=True)]
        if len(set(zip(names, (own.seed for own in models), strict=True))) == len(names):
            return names
    return [f"{kind} ({place})" for kind, place in zip(kinds, places, strict=True)]


def study_variant(folder: Path) -> str | None:
    """The variant of a run of a study, in the folder `STUDY/VARIANT/lr_RATE`; None for others."""
    variant = folder.resolve().parent
    file = variant.parent / CONFIG_FILE
    # The folder may be anyone's, with a config of another kind.
    config = read_json(file) if file.is_file() else None
    variants = config.get("variants") if isinstance(config, dict) else None
    named = [one.get("name") for one in variants or () if isinstance(one, dict)]
    return variant.name if variant.name in named else None
