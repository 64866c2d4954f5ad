"""The settings of a study: the variants of a table, and the runs that each of them is trained in.

They are apart from the command `protot_jax.study`, whose flags a config file would define again if
it imported the module that runs as `__main__`.
"""

from collections.abc import Iterator
import dataclasses
import json
from typing import Any, Literal, get_args

from ml_collections import ConfigDict

from lm_jax.errors import UsageError
from lm_jax.model.mixers import Mixer
from lm_jax.run.config_files import in_mode
from protot_jax.config import PretrainConfig, smoke, with_fields
from protot_jax.saved_run import model

Split = Literal["validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One row of a table.

    Attributes:
      name: of its folder.
      changes: what differs from the study's `base`, as `field=value`; a value is JSON, or a word.
      learning_rates: to choose from; none stands for that of `base` or of `changes`.
      paper: what the paper's table says, if it is in one.
    """

    name: str
    changes: tuple[str, ...] = ()
    learning_rates: tuple[float, ...] = ()
    paper: float | None = None


@dataclasses.dataclass(frozen=True)
class StudyConfig:
    """An ablation.

    Attributes:
      base: what all variants share.
      variants: the rows.
      table: of the paper.
      paper_split: the text that the paper's perplexities are of.
      smoke: makes every variant so small, after its changes, that it takes seconds.
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
    **shared: Any,
) -> ConfigDict:
    """The `get_config(mode)` of an ablation; `shared` are fields of `PretrainConfig`.

    Raises:
      UsageError: for an unknown mode, or a variant that changes what is not there.
    """
    config = StudyConfig(PretrainConfig(**shared), variants, table, paper_split)
    return in_mode(mode, config, {"smoke": _smoke}, of="a study")


def _smoke(config: StudyConfig) -> StudyConfig:
    # A mixer that is never trained may not train: of the variants with one mixer the last, which
    # has the longest context where that is what differs.
    last: dict[Mixer, Variant] = {}
    for variant in config.variants:
        own = changed(config.base, variant)
        _, mixer = model(own, own.corpus.vocab_size)
        last[mixer] = dataclasses.replace(variant, learning_rates=variant.learning_rates[:1])
    return dataclasses.replace(config, variants=tuple(last.values()), smoke=True)


def _small(own: PretrainConfig, base: PretrainConfig) -> PretrainConfig:
    """A variant in seconds: two steps, of a context that is as many times that of the base."""
    small = smoke(own)
    context = small.context * own.context // base.context
    return dataclasses.replace(small, context=context, max_steps=2, eval_every=2)


def changed(base: PretrainConfig, variant: Variant) -> PretrainConfig:
    """The settings of a variant.

    Raises:
      UsageError: naming the variant, for a change without value, of no field or of another type.
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
    # A word needs no quotes, as on a command line.
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
