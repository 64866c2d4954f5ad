"""The numbers of a run besides those of its seeds."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.model.decoder import count_params
from lm_jax.model.flops import forward_flops
from lm_jax.text.examples import Examples, OnePass
from lm_jax.text.preparation import SplitSize
from lm_jax.train.objective import MakeBatch
from protot_jax.mixers.prototypes import PrototypeMixer
from protot_jax.studies.pretraining.results import CorpusSummary, PretrainSummary, SeedSummary
from protot_jax.training.config import PretrainConfig
from protot_jax.training.saved_run import Data, batch_maker, model


def unigram_perplexity(train_split: Examples, evaluated: Examples, make_batch: MakeBatch) -> float:
    """Perplexity of the evaluated targets under the frequencies of the training targets.

    With add-one (Laplace) smoothing, so that no token has probability 0. Targets are those that the
    loss counts, without `<bos>` where no document follows another.
    """
    vocab_size = train_split.prepared.manifest["vocab_size"]
    counts_V = np.ones(vocab_size)
    for target_M in _targets(train_split, make_batch):
        counts_V += np.bincount(target_M, minlength=vocab_size)
    # Padding does not count.
    counts_V[0] = 0
    log_V = np.log(np.maximum(counts_V, 1) / counts_V.sum())
    losses = [-log_V[target_M] for target_M in _targets(evaluated, make_batch)]
    return float(np.exp(np.concatenate(losses).mean()))


def _targets(examples: Examples, make_batch: MakeBatch) -> Iterator[np.ndarray]:
    passed = OnePass(examples, batch_size=256)
    for k in range(passed.per_epoch):
        batch = make_batch(jnp.asarray(passed.at(k)["tokens"]))
        yield np.asarray(batch.target_BT)[np.asarray(batch.loss_mask_BT)]


def summarise(config: PretrainConfig, data: Data, seeds: Sequence[SeedSummary]) -> PretrainSummary:
    """The summary of a run whose seeds are trained."""
    manifest = data.prepared.manifest
    cfg, mixer = model(config, manifest["vocab_size"])
    parameters = count_params(cfg, mixer=mixer)
    unused = mixer.unused(cfg) if isinstance(mixer, PrototypeMixer) else 0
    return PretrainSummary(
        model=config.model,
        parameters=parameters,
        parameters_in_use=parameters - unused,
        forward_flops_per_example=forward_flops(cfg, mixer, config.context).total,
        tie_embeddings=config.tie_embeddings,
        compute_dtype=config.dtype,
        weights_and_moments_dtype=config.weights_dtype,
        corpus=_corpus(config, data, manifest),
        unigram_perplexity=unigram_perplexity(
            data.train, data.validation, batch_maker(config, data.prepared.tokenizer)
        ),
        seeds=tuple(seeds),
        device=jax.devices()[0].device_kind,
    )


def _corpus(config: PretrainConfig, data: Data, manifest: Any) -> CorpusSummary:
    return CorpusSummary(
        source=config.corpus.source,
        splits={name: SplitSize(**split) for name, split in manifest["splits"].items()},
        documents_used={
            "train": data.train.documents,
            "validation": data.validation.documents,
            "test": data.test.documents,
        },
        training_examples=data.train.count,
        skipped=manifest["skipped"],
        truncated_documents=data.train.truncated,
        unused_tokens=data.train.unused_tokens,
    )
