"""Config of an ablation study: the variants of a table, and the runs of each variant.

It is separate from the command (`protot_jax.studies.ablations`), whose flags a config file would
define again if it imported the module that runs as `__main__`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import functools
import json
from typing import Any, Literal, get_args

from ml_collections import ConfigDict

from lm_jax.console.config_files import in_mode
from lm_jax.errors import UsageError
from lm_jax.model.mixers import Mixer
from lm_jax.text.preparation import CorpusConfig
from protot_jax.training.config import PretrainConfig, smoke, with_fields
from protot_jax.training.saved_run import model

Split = Literal["validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One row of a table.

    Attributes:
      name: name of the variant's folder.
      changes: differences from the study's `base`, as `field=value`; a value is JSON or a word.
      learning_rates: learning rates to choose from; if empty, the one of `base` or of `changes`.
      paper: perplexity in the paper's table, if it has one.
    """

    name: str
    changes: tuple[str, ...] = ()
    learning_rates: tuple[float, ...] = ()
    paper: float | None = None


@dataclasses.dataclass(frozen=True)
class StudyConfig:
    """An ablation.

    Attributes:
      base: settings that all variants share.
      variants: rows of the table: name, changes of `base`, learning rates and the paper's
        perplexity.
      table: name of the paper's table.
      paper_split: split of the text on which the paper's perplexities were measured.
      smoke: whether every variant, after its changes, is shrunk to a run of seconds.
    """

    base: PretrainConfig
    variants: tuple[Variant, ...]
    table: str = ""
    paper_split: Split = "validation"
    smoke: bool = False

    def __post_init__(self) -> None:
        names = [variant.name for variant in self.variants]
        if not names or len(set(names)) < len(names):
            raise UsageError(f"config.variants are named {names}; give each a name of its own")
        for variant in self.variants:
            changed(self.base, variant)


def study(
    mode: str,
    *variants: Variant,
    table: str,
    paper_split: Split = "validation",
    sizes: Mapping[str, Mapping[str, Any]] | None = None,
    other: Mapping[str, Iterable[Variant]] | None = None,
    **shared: Any,
) -> ConfigDict:
    """The `get_config(mode)` of an ablation; `shared` are fields of `PretrainConfig`.

    Modes are "" and "smoke", those of `sizes`, each with the fields that it changes, and those of
    `other`, each with its own variants.

    Raises:
      UsageError: for an unknown mode, or a variant that changes an unknown field.
    """
    config = StudyConfig(PretrainConfig(**shared), variants, table, paper_split)
    modes: dict[str, Callable[[StudyConfig], StudyConfig]] = {"smoke": _smoke}
    for name, own in (other or {}).items():
        modes[name] = functools.partial(dataclasses.replace, variants=tuple(own))
    for name, fields in (sizes or {}).items():
        modes[name] = functools.partial(dataclasses.replace, base=with_fields(config.base, fields))
    return in_mode(mode, config, modes, of="a study")


# The default of the paper's tables, on introductions of Wikipedia articles: of 66,555, some 61,200
# are of the training split and 4,660 of the validation split.
PAPER_PROTOCOL: Mapping[str, Any] = {
    "corpus": CorpusConfig(source="wiki", unit="document", splits=(0.92, 0.07, 0.01)),
    "train_documents": 18_000,
    "validation_documents": 4_000,
}
_CPU_PROTOCOL: Mapping[str, Any] = {
    "corpus": CorpusConfig(source="wiki", unit="document", vocab_size=8_000),
    "train_documents": 18_000,
    "validation_documents": 1_000,
    "test_documents": 600,
    "epochs": 3,
    "dtype": "float32",
    "early_stop": False,
}
_CPU_SMALL: Mapping[str, Any] = {
    "hidden_size": 128,
    "num_layers": 4,
    "context": 128,
    "prototypes.num_prototypes": 16,
    "corpus.vocab_size": 4_000,
    "train_documents": 9_000,
    "validation_documents": 500,
    "test_documents": 500,
}


_SIZES: Mapping[str, Mapping[str, Any]] = {
    "small": _CPU_SMALL,
    "whole": {"corpus.vocab_size": 16_000, "epochs": 10, "dtype": "bfloat16"},
}


def cpu_study(mode: str, *variants: Variant, table: str) -> ConfigDict:
    """A study in the paper's protocol at a size for a CPU, on introductions of Wikipedia articles.

    18,000 examples that are the first tokens of a document each, with half the paper's vocabulary
    and three of its ten epochs; its perplexities are of test text. Mode "small" has half the
    examples, context and width, four layers and 16 prototypes; "whole" the paper's vocabulary,
    epochs and precision.
    """
    return study(mode, *variants, table=table, paper_split="test", sizes=_SIZES, **_CPU_PROTOCOL)


def _smoke(config: StudyConfig) -> StudyConfig:
    # Every mixer is trained once: of the variants with the same mixer the last, which has the
    # longest context if contexts differ.
    last: dict[Mixer, Variant] = {}
    for variant in config.variants:
        own = changed(config.base, variant)
        _, mixer = model(own, own.corpus.vocab_size)
        last[mixer] = dataclasses.replace(variant, learning_rates=variant.learning_rates[:1])
    return dataclasses.replace(config, variants=tuple(last.values()), smoke=True)


def _small(own: PretrainConfig, base: PretrainConfig) -> PretrainConfig:
    """A variant that runs in seconds: two steps, and a context scaled as the base's is."""
    small = smoke(own)
    context = small.context * own.context // base.context
    return dataclasses.replace(small, context=context, max_steps=2, eval_every=2)


def changed(base: PretrainConfig, variant: Variant) -> PretrainConfig:
    """The settings of a variant.

    Raises:
      UsageError: naming the variant; a change has no value, no such field or the wrong type.
    """
    where = f"variant {variant.name}"
    changes = {}
    for change in variant.changes:
        name, equals, text = change.partition("=")
        if not equals:
            raise UsageError(f"{where}: {change!r} has no value; write field=value")
        changes[name] = _value(text)
    try:
        return with_fields(base, changes)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def _value(text: str) -> Any:
    # As on a command line, a word needs no quotes.
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def each_run(config: StudyConfig, variant: Variant) -> Iterator[tuple[str, PretrainConfig]]:
    """The folder and the settings of every run of a variant."""
    own = changed(config.base, variant)
    own = _small(own, config.base) if config.smoke else own
    for rate in variant.learning_rates or (own.learning_rate,):
        yield f"{variant.name}/lr_{rate:g}", dataclasses.replace(own, learning_rate=rate)
