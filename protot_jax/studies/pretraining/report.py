"""The report of a run: perplexities of its seeds, and the course of the training."""

import math
from pathlib import Path

import pyarrow.parquet as pq

from lm_jax import report
from lm_jax.report import Column, Report, Section, Series, section, table
from lm_jax.report.markup import Markup
from lm_jax.train.metrics import EVALUATIONS
from protot_jax.studies.pretraining.results import PretrainSummary, SeedSummary
from protot_jax.studies.pretraining.settings import PretrainSettings
from protot_jax.training.card import test, validation
from protot_jax.training.saved_run import seed_folder


def build(config: PretrainSettings, summary: PretrainSummary, folder: Path) -> Report:
    """The report of a summary and of the evaluations in the folder."""
    del config
    lines = format_summary(summary)
    return Report(
        f"Pretraining of {summary.model}",
        lambda: [seeds(summary), course(summary, folder), text(summary)],
        lead=[_verdict(summary)],
        lines=lines,
    )


def format_summary(summary: PretrainSummary) -> list[str]:
    """Perplexities of the best and the last weights and their n, and the size of the model."""
    seeds = summary.seeds
    best = [each.best for each in seeds]
    last = [each.last for each in seeds]
    of_best, unigram = validation(best), summary.unigram_perplexity
    lines = [
        _answer(summary),
        f"over {seeds[0].validation_tokens:,} tokens of validation and {seeds[0].test_tokens:,} of "
        "test, of the weights of lowest validation perplexity; unigram model "
        f"{unigram:.1f}, {unigram / of_best.mean:.2f} times",
    ]
    if any(each.best.step != each.last.step for each in seeds):
        lines.append(f"of the last weights: validation {validation(last)}, test {test(last)}")
    lines.append(
        f"{summary.parameters:,} parameters ({summary.parameters_in_use:,} in use), "
        f"{summary.forward_flops_per_example / 1e6:,.0f} MFLOPs forward an example, "
        f"{'tied' if summary.tie_embeddings else 'untied'}, {summary.compute_dtype} "
        f"compute on {summary.weights_and_moments_dtype} weights, "
        f"{seeds[0].tokens_seen:,} tokens seen "
        f"({summary.corpus.training_examples:,} examples per epoch), "
        f"{len(seeds)} seed{'s' * (len(seeds) > 1)}"
    )
    return lines


def _answer(summary: PretrainSummary) -> str:
    """The perplexity of the best weights, which opens the page and the terminal."""
    best = [one.best for one in summary.seeds]
    return f"{summary.model}: validation perplexity {validation(best)}, test {test(best)}."


def _verdict(summary: PretrainSummary) -> Markup:
    return report.verdict(
        _answer(summary),
        f"Of the weights of lowest validation perplexity. A model that knows the frequencies of "
        f"tokens alone has {summary.unigram_perplexity:.1f}.",
    )


def seeds(summary: PretrainSummary) -> Section:
    """A row for each seed and its best and last weights."""
    rows = [
        [one.seed, name, weights.step, weights.validation_perplexity, weights.test_perplexity]
        for one in summary.seeds
        for name, weights in (("best", one.best), ("last", one.last))
    ]
    first = summary.seeds[0]
    return section(
        "Perplexity",
        table(
            [
                Column("Seed", "d"),
                "Weights",
                Column("Update", ",d"),
                Column("Validation", ".2f"),
                Column("Test", ".2f"),
            ],
            rows,
            caption="Perplexity, weighted by token, of the weights of lowest validation perplexity "
            "and of the last ones.",
            n=f"{first.validation_tokens:,} and {first.test_tokens:,} tokens",
        ),
    )


def course(summary: PretrainSummary, folder: Path) -> Section | None:
    """The validation loss by update; nothing where a copy of the run has no evaluations."""
    curves = [_curve(one, seed_folder(folder, one.seed) / EVALUATIONS) for one in summary.seeds]
    known = [curve for curve in curves if curve]
    if not known:
        return None
    return section(
        "Training",
        report.curves(
            known,
            caption="Validation loss by update.",
            x_label="update",
            y_label="nats per token",
            n=f"{summary.seeds[0].validation_tokens:,} tokens",
            h_lines=[(math.log(summary.unigram_perplexity), "unigram")],
        ),
    )


def _curve(one: SeedSummary, file: Path) -> Series | None:
    if not file.is_file():
        return None
    rows = pq.read_table(file, filters=[("name", "=", "validation/perplexity")]).to_pylist()
    finite = [row for row in rows if math.isfinite(row["value"])]
    if not finite:
        return None
    losses = [math.log(row["value"]) for row in finite]
    return Series(f"seed {one.seed}", [row["step"] for row in finite], losses)


def text(summary: PretrainSummary) -> Section:
    """The corpus and the model."""
    corpus = summary.corpus
    return section(
        "Model and text",
        report.key_values(
            {
                "parameters": f"{summary.parameters:,}",
                "parameters in use": f"{summary.parameters_in_use:,}",
                "text": corpus.source,
                "documents": {name: f"{used:,}" for name, used in corpus.documents_used.items()},
                "training examples": f"{corpus.training_examples:,}",
                "unigram perplexity": f"{summary.unigram_perplexity:.1f}",
            }
        ),
    )
