"""Scores the questions with every model.

Besides what every study has, the work folder holds

    scores/    the log-likelihood of every choice, under a hash of model and gates, so that more
               questions or models of the same folder are not scored again
"""

import collections
import contextlib
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from lm_jax.errors import BadInputError
from lm_jax.evaluate import multiple_choice
from lm_jax.evaluate.multiple_choice import Scorer
from lm_jax.model.decoder import forward, last_change
from lm_jax.model.precision import exact_jit
from lm_jax.run.finished import Inputs, file_inputs
from lm_jax.study import Work
from lm_jax.weights import hub
from lm_jax.weights.load import Pretrained, identities, load_pretrained
from sparse_jax.gates import model as sparse_model
from sparse_jax.gates.model import SparseModel
from sparse_jax.studies.multiple_choice import numbers
from sparse_jax.studies.multiple_choice.results import ChoiceSummary
from sparse_jax.studies.multiple_choice.settings import DENSE, MultipleChoiceConfig

SCORES = "scores"


def inputs(config: MultipleChoiceConfig) -> Inputs:
    """The models by name and the file of questions, without loading weights.

    Raises:
      BadInputError, CorruptError: a model cannot be read.
    """
    dense = {DENSE: config.dense, **{name: name for name in config.controls}}
    return {
        **identities(dense),
        **identities({name: name for name in config.sparse}, sparse_model.open_identity),
        **file_inputs({"config.truthfulqa": config.truthfulqa}),
    }


def measure(config: MultipleChoiceConfig, work: Work) -> ChoiceSummary:
    """Scores the choices that have no score yet, and compares the models."""
    for path in config.sparse:
        sparse_model.read_note(path)
    questions = multiple_choice.read_tasks(
        config.tasks, truthfulqa_file=config.truthfulqa, limit=config.limit or None
    )
    dtype = jnp.dtype(config.dtype)
    named = {DENSE: config.dense, **{name: name for name in config.controls}}
    dense = {name: load_pretrained(source, dtype=dtype) for name, source in named.items()}
    sparse = {path: sparse_model.load(path, dtype=dtype) for path in config.sparse}
    models: dict[str, Pretrained | SparseModel] = {**dense, **sparse}
    weights = [
        hub.identity(name, each.identity.text, _base(each).revision)
        for name, each in models.items()
    ]
    work.record(data=dict(collections.ChainMap(*weights)))
    with contextlib.ExitStack() as stack:
        scorers = {
            name: scorer(name, each, config, stack, work.path / SCORES)
            for name, each in models.items()
        }
        comparison = multiple_choice.compare(
            scorers, questions, controls=config.controls, quiet=False
        )
    return numbers.summarise(
        comparison,
        digests={name: _base(each).sha256 for name, each in models.items()},
        edges={
            path: each.numbers.get("open edges", "not recorded") for path, each in sparse.items()
        },
        device=jax.devices()[0].device_kind,
    )


def scorer(
    name: str,
    model: Pretrained | SparseModel,
    config: MultipleChoiceConfig,
    stack: contextlib.ExitStack,
    scores: Path,
) -> Scorer:
    """Scorer of one model, with its scores on disk while `stack` is open.

    Raises:
      BadInputError: the model has no tokenizer.
    """
    base, settings = _base(model), {"dtype": config.dtype}
    if base.tokenizer is None:
        raise BadInputError(
            f"the model {name} has no tokenizer; put its tokenizer.json beside the weights"
        )
    logits = exact_jit(functools.partial(_logits, model))
    return Scorer(
        logits=functools.partial(logits, base.params),
        tokenizer=base.tokenizer,
        max_length=base.cfg.max_length,
        batch_tokens=config.batch_tokens,
        cache=stack.enter_context(
            multiple_choice.open_cache(scores, model=model.identity.text, settings=settings)
        ),
    )


def _logits(
    model: Pretrained | SparseModel, params: Any, tokens_BT: jax.Array, valid_BT: jax.Array
) -> jax.Array:
    # Weights are an argument, because a compiled program contains what it closes over.
    if not isinstance(model, SparseModel):
        return forward(params, tokens_BT, model.cfg, valid_BT=valid_BT).logits
    # Without rotations by length, the gates need not tell padding apart.
    counted = last_change(model.cfg, tokens_BT.shape[1])
    run = model.with_params(params).forward(tokens_BT, valid_BT=valid_BT if counted else None)
    return run.logits


def _base(model: Pretrained | SparseModel) -> Pretrained:
    return model.base if isinstance(model, SparseModel) else model
