"""Config of an ablation study: the variants of a table, and the runs of each variant.

It is separate from the command `protot_jax.study`, whose flags a config file would define again if
it imported the module that runs as `__main__`.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
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
      changes: differences from the study's `base`, as `field=value`; a value is JSON or a word.
      learning_rates: to choose from; if empty, that of `base` or of `changes`.
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
      variants: the rows.
      table: name of the paper's table.
      paper_split: the split of the paper's perplexities.
      smoke: shrinks every variant, after its changes, to a run of seconds.
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
    small: Mapping[str, Any] | None = None,
    **shared: Any,
) -> ConfigDict:
    """The `get_config(mode)` of an ablation; `shared` are fields of `PretrainConfig`.

    Modes are "" and "smoke", and "small" where there are fields that it changes.

    Raises:
      UsageError: for an unknown mode, or a variant that changes an unknown field.
    """
    config = StudyConfig(PretrainConfig(**shared), variants, table, paper_split)
    modes = {"smoke": _smoke}
    if small is not None:
        base = with_fields(config.base, small)
        modes["small"] = functools.partial(dataclasses.replace, base=base)
    return in_mode(mode, config, modes, of="a study")


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
    """A variant in seconds: two steps, with its context scaled as that of the base."""
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
