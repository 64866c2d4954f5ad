"""Trains the heads, and measures them before and after.

Besides what every study has, the work folder holds

    data/             the prepared corpus
    calibration.json  b_auto, where the recipe asks for it (`bias_tables` for one of each head)
    train/            checkpoints, metrics.parquet, evaluations.parquet (`lm_jax.train.loop`)
    rows.parquet      one row per head (`results.ROWS`)
    losses.parquet    one row per window (`results.LOSSES`)
    trained/          the trained heads, as `polyattn_jax.load_trained` reads them
"""

from pathlib import Path
import shutil

import jax

from lm_jax.model import params as params_lib
from lm_jax.run.finished import Inputs, file_inputs
from lm_jax.run.tables import write_table
from lm_jax.study import Work
from lm_jax.text.corpora import corpus_inputs
from lm_jax.train.config import CheckpointPolicy
from lm_jax.train.loop import TrainResult, TrainRun, train
from lm_jax.weights import hub
from lm_jax.weights.load import identities
from polyattn_jax.audit.results.provenance import read_provenance
from polyattn_jax.recipes.hybrid_recipe import HybridRecipe
from polyattn_jax.recipes.row_maps import parse_recipe
from polyattn_jax.studies.distill.matching import HeadMatching
from polyattn_jax.studies.distill.measure import head_table, loss_table, measure
from polyattn_jax.studies.distill.numbers import summarise
from polyattn_jax.studies.distill.results import DistillSummary
from polyattn_jax.studies.distill.settings import DistillConfig
from polyattn_jax.studies.distill.task import TRAIN, Task, objective_of, open_task
from polyattn_jax.studies.distill.trained import TrainedHeads, save_trained

TRAINED = "trained"


def inputs(config: DistillConfig) -> Inputs:
    """The model, the heads and the text of a training."""
    return {
        **identities({"model": config.model}),
        **file_inputs({"config.hybrid": config.hybrid}),
        **corpus_inputs({"config.corpus": config.corpus.source}),
    }


def train_heads(task: Task, objective: HeadMatching, folder: Path) -> TrainResult:
    """Trains to the last step, from the last checkpoint in `folder`."""
    config = task.config
    return train(
        folder,
        TrainRun(
            objective=objective,
            config=config.train,
            batches=task.batches,
            validation=task.validation,
            seed=config.seed,
            frozen=task.base.params,
            base_sha256=task.base.identity.text,
            in_nats=False,
        ),
        task.mesh,
        CheckpointPolicy(
            save_every=config.save_every, log_every=10, allow_fallback=config.allow_fallback
        ),
    )


def train_and_measure(config: DistillConfig, work: Work) -> DistillSummary:
    """Trains or resumes it, writes the trained heads, and measures them."""
    folder = work.path
    task = open_task(config, folder)
    manifest = task.prepared.manifest
    work.record(
        data=hub.identity("model", task.base.identity.text, task.base.revision)
        | {"documents": manifest["documents_sha256"]}
        | dict(manifest["sources"]),
        tokenizer=manifest["tokenizer_sha256"],
    )
    objective = objective_of(task, folder)
    trained = train_heads(task, objective, folder / TRAIN)
    heads = HybridRecipe(
        version=1,
        model=config.model,
        model_sha256=task.base.identity.text,
        recipe=task.hybrid.recipe if task.hybrid else parse_recipe(config.recipe).spec,
        bias=objective.bias,
        layers=objective.cfg.num_layers,
        heads=objective.cfg.num_heads,
        replaced=objective.replaced,
    )
    shutil.rmtree(folder / TRAINED, ignore_errors=True)
    save_trained(folder / TRAINED, TrainedHeads(heads, config.adapters, dict(trained.state.params)))
    # Adapters change nothing at first, and matrices are the identity: the recipe as it is.
    untrained = params_lib.init(jax.random.key(config.seed), objective.spec)
    before, after = (measure(task, objective, p) for p in (untrained, trained.state.params))
    by_head, losses = head_table(objective, before, after), loss_table(before, after)
    source = read_provenance(folder, config)
    write_table(folder / "rows.parquet", by_head, source)
    write_table(folder / "losses.parquet", losses, source)
    return summarise(task, objective, (before, after), (by_head, losses), folder)
