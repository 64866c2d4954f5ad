"""Provenance of the results of an audit or a check, as dataclasses.

`provenance.json` is written by `lm_jax.run.provenance`; every result file repeats it, with the
sha256 of the settings.
"""

import dataclasses
from pathlib import Path

from lm_jax.run.config import config_hash
from lm_jax.run.provenance import PROVENANCE_FILE
from lm_jax.run.results import Count, load_result
from polyattn_jax.config import AuditConfig


@dataclasses.dataclass(frozen=True)
class Commit:
    """The commit of the code, and whether files differed from it."""

    commit: str
    dirty: bool


@dataclasses.dataclass(frozen=True)
class Device:
    """The devices of a run."""

    platform: str
    kind: str
    count: Count
    processes: Count


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of a run, as `lm_jax.run.provenance` records it."""

    start: str
    command: str
    git: Commit | None
    packages: dict[str, str]
    python: str
    system: str
    device: Device | None
    dtype: str | None
    seeds: dict[str, int]
    data: dict[str, str]
    tokenizer: str | None


@dataclasses.dataclass(frozen=True)
class Record(Start):
    """`provenance.json`: the first start of a run and later ones."""

    restarts: tuple[Start, ...]


@dataclasses.dataclass(frozen=True)
class Provenance(Record):
    """Provenance of a result file.

    Attributes:
      config_hash: sha256 of the settings.
    """

    config_hash: str


def read_provenance(folder: Path, config: AuditConfig) -> Provenance:
    """The provenance of results in `folder`, with the hash of their settings.

    Raises:
      CorruptError: `provenance.json` is damaged.
    """
    record = load_result(folder / PROVENANCE_FILE, Record)
    return Provenance(**vars(record), config_hash=config_hash(config))
