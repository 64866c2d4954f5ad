"""Provenance of the results of an audit or a check."""

import dataclasses
from pathlib import Path
from typing import Any

from lm_jax.run import provenance
from lm_jax.run.config import config_hash


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provenance(provenance.Provenance):
    """Provenance that every result file repeats.

    Attributes:
      config_hash: sha256 of the settings.
    """

    config_hash: str


def read_provenance(folder: Path, config: Any) -> Provenance:
    """The provenance of results in `folder`, with the hash of their settings, a dataclass.

    Raises:
      CorruptError: `provenance.json` is missing or damaged.
    """
    record = provenance.read_provenance(folder)
    return Provenance(**vars(record), config_hash=config_hash(config))
