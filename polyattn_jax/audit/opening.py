"""What an audit, a check, a search and a diagnosis begin with: inputs, model, suites and stores."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from lm_jax.run.config import canonical_json, config_hash
from lm_jax.run.finished import Inputs, file_inputs
from lm_jax.study import Opened, Work
from lm_jax.weights import hub
from lm_jax.weights.load import identities, resolve
from polyattn_jax.audit import (
    bias_tables,
    model_calibration,
    multiple_choice,
    stages,
    summary,
    units,
)
from polyattn_jax.audit.audit_suites import build_suites
from polyattn_jax.audit.audited_model import AuditedModel, load, model_identity
from polyattn_jax.audit.columns import columns, where
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.results import ConditionResult, TextLoss
from polyattn_jax.audit.stages import Condition
from polyattn_jax.recipes.calibrate import Calibration
from polyattn_jax.recipes.row_maps import Calibrated, Recipe
from polyattn_jax.suites import Suite, read_jsonl, read_texts
from polyattn_jax.suites.texts import SHIPPED

Suites = dict[str, Suite]


@dataclasses.dataclass(frozen=True)
class OpenAudit:
    """A model that is loaded, the suites that it is asked, and the rows that are there already."""

    model: AuditedModel
    suites: Suites
    stores: units.ResultStores
    folder: Path

    def calibrate(self) -> Calibration:
        """Calibrates b_auto, or reads what an earlier start found."""
        return model_calibration.calibrated(self.model, self.folder)

    def biases(self, recipes: Mapping[str, Recipe], b_auto: float | None = None) -> Calibrated:
        """Every calibrated bias that the recipes ask for, by its name there."""
        return bias_tables.calibrated(self.model, self.folder, recipes, b_auto)

    def evaluate(self, conditions: Sequence[Condition], suite: str) -> dict[str, ConditionResult]:
        """Asks for or resumes the answers to a suite; the results of the stage by condition."""
        stages.evaluate(self.model, self.stores, conditions, {suite: self.suites[suite]})
        answers = columns(self.stores.answers.read())
        results = summary.behaviour(answers, conditions[0].stage, self.model.config)
        return {result.cell: result for result in results}

    def text_losses(
        self, conditions: Sequence[Condition], suite: str, *, one_document: bool = False
    ) -> dict[str, TextLoss]:
        """Measures or resumes the loss on texts; the results of the stage by condition."""
        stages.text_losses(self.model, self.stores, conditions, self.suites[suite])
        losses, stage = columns(self.stores.text_losses.read()), conditions[0].stage
        results = summary.text_losses(losses, stage, one_document=one_document)
        return {result.cell: result for result in results}

    def divergences(self, conditions: Sequence[Condition], suite: str) -> dict[str, float]:
        """Measures or resumes the KL from softmax on texts; the mean of the stage by condition."""
        stages.divergences(self.model, self.stores, conditions, self.suites[suite])
        rows = where(columns(self.stores.divergences.read()), stage=conditions[0].stage)
        return {
            cell: float(np.average(own["divergence"], weights=own["length"]))
            for cell in dict.fromkeys(rows["cell"].tolist())
            for own in [where(rows, cell=cell)]
        }


def opened(config: AuditConfig) -> Opened:
    """The inputs of an audit, check or search, all of which are read before its folder is made."""
    return Opened(inputs(config), load=lambda: check_readable(config))


def inputs(config: AuditConfig) -> Inputs:
    """The model and the files that an audit, check or search of these settings reads.

    What is gone is left out, so that a finished run is shown.

    Raises:
      BadInputError: the model or a file is there and cannot be read.
    """
    return identities({"model": config.model}, model_identity) | files(config)


def files(config: AuditConfig) -> dict[str, str]:
    """Digests of the files that these settings name, but for those that are gone."""
    biases = [recipe.bias for recipe in config.with_ablation.values() if recipe.tabled]
    return file_inputs(
        {
            "config.prompts": config.prompts,
            "config.text": config.text,
            "config.truthfulqa": config.truthfulqa,
            "config.calibration_text": (
                "" if config.calibration_text in SHIPPED else config.calibration_text
            ),
            "config.haystack": "" if config.haystack in SHIPPED else config.haystack,
            **{f"biases {name}": str(name) for name in biases},
        }
    )


def check_readable(config: AuditConfig) -> None:
    """Reads all that an audit needs but the weights: no model is loaded for faulty prompts.

    Raises:
      BadInputError: the model or a file is not there, or cannot be read.
    """
    resolve(config.model)
    if config.prompts:
        read_jsonl(config.prompts)
    for text in filter(None, (config.text, config.calibration_text)):
        read_texts(text)
    multiple_choice.read_questions(config)


def fingerprint(audited: AuditedModel, suites: Suites) -> str:
    """Hash of everything that determines the rows: settings, model, suites."""
    identity: dict[str, Any] = {
        "config": canonical_json(audited.config),
        "model": audited.model.identity.text,
        "suites": {name: suite.sha256 for name, suite in suites.items()},
    }
    if biases := bias_tables.digests(audited.config.with_ablation):
        identity["biases"] = biases
    return config_hash(identity)


@contextlib.contextmanager
def open_audit(
    config: AuditConfig, work: Work, build: Callable[[AuditedModel], Suites] = build_suites
) -> Iterator[OpenAudit]:
    """Loads the model, builds the suites, records both, and opens the stores of the work folder.

    Args:
      config: settings, on which the fingerprint of the rows depends.
      work: folder of the run.
      build: maker of the suites, from the model.

    Raises:
      BadInputError: the model cannot be used.
      UsageError: the rows in the folder are of another model or of other suites.
    """
    audited = load(config)
    suites = build(audited)
    work.record(
        data=hub.identity("model", audited.model.identity.text, audited.model.revision)
        | {name: suite.sha256 for name, suite in suites.items()},
        tokenizer=audited.tokenizer.sha256,
    )
    identity = fingerprint(audited, suites)
    with units.open_stores(work.path, identity, config.degrees) as stores:
        yield OpenAudit(audited, suites, stores, work.path)
