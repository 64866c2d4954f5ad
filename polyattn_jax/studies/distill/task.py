"""The model, the data and the objective of a distillation."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.assets import published
from lm_jax.errors import BadInputError, UsageError
from lm_jax.evaluate.samples import prepare_samples
from lm_jax.model import lora
from lm_jax.model.decoder import param_spec
from lm_jax.parallel import sharding
from lm_jax.run.results import load_result
from lm_jax.text.examples import Batch, Batches, Examples, OnePass
from lm_jax.text.preparation import prepare_corpus
from lm_jax.text.prepared import Prepared
from lm_jax.train.step import check_batch
from lm_jax.weights import runs
from lm_jax.weights.load import Pretrained, open_pretrained
from polyattn_jax.audit import bias_tables, model_calibration
from polyattn_jax.audit.audited_model import AuditedModel
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.recipes.hybrid_recipe import HybridRecipe, check_model, replaced_heads
from polyattn_jax.recipes.row_maps import parse_recipe, resolve_bias
from polyattn_jax.studies.distill.matching import HeadMatching, LogitMatching
from polyattn_jax.studies.distill.settings import DistillConfig

DATA, TRAIN, TRAIN_LOGITS = "data", "train", "train_logits"


class Onward:
    """The batches of another training from its batch `start` on."""

    def __init__(self, batches: Batches, start: int) -> None:
        self._batches, self._start = batches, start
        self.fingerprint = f"{batches.fingerprint} from={start}"
        self.per_epoch = batches.per_epoch

    def at(self, k: int) -> Batch:
        """Batch k = 0, 1, ..., which is batch `start + k` of the other training."""
        return self._batches.at(self._start + k)


@dataclasses.dataclass(frozen=True)
class Task:
    """The model, its data and the devices."""

    config: DistillConfig
    mesh: jax.sharding.Mesh
    base: Pretrained
    hybrid: HybridRecipe | None
    prepared: Prepared
    training: Examples
    batches: Batches
    validation: OnePass

    def with_seed(self, seed: int) -> "Task":
        """The same with another seed of adapters and order of the text."""
        config = dataclasses.replace(self.config, seed=seed)
        share = sharding.own_block(self.mesh, config.batch_size)
        batches = Batches(self.training, seed=seed, **share)
        return dataclasses.replace(self, config=config, batches=batches)


def open_task(config: DistillConfig, folder: Path) -> Task:
    """Prepares the data of the model, and loads its weights after every other check.

    Raises:
      UsageError: the batch does not divide over the devices, or the model has too few positions or
        lacks the weights to adapt.
      BadInputError: there is no such model or it has no tokenizer; the corpus has less than one
        batch of windows, or fewer than two documents to measure on; the hybrid is of another model.
      CorruptError: the file of the hybrid is damaged.
    """
    mesh = sharding.make_mesh(*config.mesh)
    check_batch(config.batch_size, 1, mesh)
    hybrid = load_result(config.hybrid, HybridRecipe) if config.hybrid else None
    run = runs.softmax_run(published.resolve_model(config.model), dtype=jnp.float32, mesh=mesh)
    opened = run or open_pretrained(config.model)
    opened.cfg.check_equal_blocks("config.model: distill")
    if opened.tokenizer is None:
        raise BadInputError(
            f"model {config.model!r} has no tokenizer; put its tokenizer.json beside the weights"
        )
    if config.context > opened.cfg.max_length:
        raise UsageError(
            f"config.context = {config.context} is beyond the {opened.cfg.max_length} positions of "
            f"{config.model}; lower it"
        )
    adapted = [config.adapters]
    if config.logit_steps:
        adapted.append(config.adapters_of_logits(maps=False))
    for settings in adapted:
        lora.adapter_spec(param_spec(opened.cfg), settings)
    prepare_samples(
        folder / DATA, config.corpus, context=config.context, tokenizer=opened.tokenizer
    )
    prepared = prepare_corpus(folder / DATA, config.corpus, tokenizer=opened.tokenizer)
    windows = functools.partial(
        Examples, prepared, context=config.context, mode="window", vocab_size=opened.cfg.vocab_size
    )
    share = sharding.own_block(mesh, config.batch_size)
    training = windows("train")
    batches = Batches(training, seed=config.seed, **share)
    held_out = windows("validation", limit=config.validation_documents)
    # A document of one id has no window.
    documents = held_out.documents - held_out.unused_tokens
    if documents < 2:
        raise BadInputError(
            f"config.corpus: {documents} document of the validation split has a window, and "
            "intervals over documents take 2; give more text, or a larger share in "
            "config.corpus.splits"
        )
    validation = OnePass(held_out, **share)
    base = opened if isinstance(opened, Pretrained) else opened.load(dtype=jnp.float32, mesh=mesh)
    if hybrid is not None:
        check_model(hybrid, base, config.hybrid)
    return Task(config, mesh, base, hybrid, prepared, training, batches, validation)


def objective_of(task: Task, folder: Path) -> HeadMatching:
    """The objective: the recipe, its bias and the heads that it replaces."""
    cfg, hybrid = task.base.cfg, task.hybrid
    replaced = replaced_heads(np.ones((cfg.num_layers, cfg.num_heads), bool))
    if hybrid is not None:
        recipe, bias, replaced = parse_recipe(hybrid.recipe), hybrid.bias, hybrid.replaced
    else:
        recipe = parse_recipe(task.config.recipe)
        bias = bias_tables.plain(_bias(task, folder))
    return HeadMatching(cfg, recipe.map, bias, replaced, task.config.adapters)


def logits_of(task: Task, first: HeadMatching) -> LogitMatching:
    """The objective of the second stage, after that of the first."""
    adapters = task.config.adapters_of_logits(maps=first.trains_maps)
    return LogitMatching(first.cfg, first.row_map, first.bias, first.replaced, adapters)


def _bias(task: Task, folder: Path) -> Any:
    """The bias of the recipe, calibrated at the context if need be."""
    config, recipe = task.config, parse_recipe(task.config.recipe)
    settings = AuditConfig(
        model=config.model,
        recipes=(recipe.spec,),
        niah_lengths=(config.context,),
        sweep_length=config.context,
        induction_n=0,
        mqar_n=0,
        budget=config.budget,
        seed=config.seed,
        resamples=config.resamples,
    )
    audited = AuditedModel(task.base, task.mesh, settings)
    b_auto = model_calibration.calibrated(audited, folder).bias if recipe.bias == "auto" else None
    named = bias_tables.calibrated(audited, folder, settings.by_name, b_auto)
    return resolve_bias(recipe, named)
