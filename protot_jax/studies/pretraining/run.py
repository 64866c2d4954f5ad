"""Trains the seeds of a run."""

import contextvars
import dataclasses
import os
from pathlib import Path
from typing import Any

from lm_jax.run import processes
from lm_jax.run.files import write_text
from lm_jax.run.finished import Inputs
from lm_jax.run.workdir import Resume
from lm_jax.study import Work, frame
from lm_jax.text.corpora import corpus_inputs
from lm_jax.text.preparation import prepare_on_first
from lm_jax.weights.card import CARD
from protot_jax.studies import pretraining
from protot_jax.studies.pretraining import numbers
from protot_jax.studies.pretraining.results import PretrainSummary
from protot_jax.studies.pretraining.settings import PretrainSettings
from protot_jax.training.card import card
from protot_jax.training.config import PretrainConfig
from protot_jax.training.pretrain import train_seed
from protot_jax.training.saved_run import DATA, load_data, seed_folder

# A prepared corpus that several runs share; None for one in the work folder.
_shared = contextvars.ContextVar[Path | None]("shared", default=None)


def inputs(config: PretrainSettings) -> Inputs:
    """The corpus, where it is still there."""
    return corpus_inputs({"config.corpus": config.corpus.source})


def measure(config: PretrainSettings, work: Work) -> PretrainSummary:
    """Trains or resumes every seed, and writes the model card."""
    _link_shared(config, work.path / DATA)
    data = load_data(config, work.path / DATA)
    manifest = data.prepared.manifest
    work.record(
        data={"documents": manifest["documents_sha256"]} | dict(manifest["sources"]),
        tokenizer=manifest["tokenizer_sha256"],
    )
    seeds = [train_seed(config, data, seed_folder(work.path, seed), seed) for seed in config.seeds]
    summary = numbers.summarise(config, data, seeds)
    processes.on_first(lambda: write_text(work.path / CARD, card(config, summary)))
    return summary


def _link_shared(config: PretrainConfig, link: Path) -> None:
    shared = _shared.get()
    if shared is not None and processes.on_first(lambda: not link.exists()):
        shared.parent.mkdir(parents=True, exist_ok=True)
        prepare_on_first(shared, config.corpus)
        at = os.path.relpath(shared, link.parent)
        processes.on_first(lambda: link.symlink_to(at, target_is_directory=True))


def run_in(
    config: Any, folder: Path, *, resume: Resume = "auto", data: Path | None = None
) -> PretrainSummary:
    """Runs or resumes in a work folder unless it is finished; prints and returns the summary.

    Args:
      config: a ConfigDict or dataclass of `PretrainConfig`.
      folder: the work folder, created if needed.
      resume: rule of resuming, which `open_workdir` explains.
      data: folder of a prepared corpus to share with other runs, prepared if needed; None prepares
        one in the work folder. The work folder links to it, so the two must be moved together.

    Raises:
      UserError: as `lm_jax.study.frame.execute`.
    """
    settings = dataclasses.asdict(config) if isinstance(config, PretrainConfig) else config
    token = _shared.set(data)
    try:
        return frame.execute(pretraining.STUDY, settings, folder, resume=resume)
    finally:
        _shared.reset(token)
