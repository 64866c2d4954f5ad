"""Reads the prototypes of a trained model: what writes to them, when they are read, what for.

    python -m protot_jax.concepts --run=runs/speeches

After Prototype Transformer, section 5.1 and appendix A.8. Into `--workdir`, by default the folder
`concepts` of the run, it writes

    activations.parquet   every gate over the beginnings of documents (`collect.py`)
    concepts.json         all statistics and the shown texts (`results.py`)
    concepts.html         the same as a page, in one offline file
    answers.jsonl         what a local judge answered

`--judge=local:FOLDER` lets a language model name the themes, `--judge=cached:FILE` takes its
answers from a file. A command that was killed is given again; only answers are not asked anew.
"""

import dataclasses
from pathlib import Path
from typing import cast

from absl import flags
import numpy as np

from lm_jax.run import cli
from lm_jax.run.files import file_digest, read_json, write_bytes, write_json
from lm_jax.run.provenance import PROVENANCE_FILE, collect_provenance, record_provenance
from lm_jax.run.results import load_result
from lm_jax.run.workdir import finish_time, mark_finished, open_workdir
from lm_jax.text.examples import Examples
from lm_jax.text.preparation import SPLITS, open_prepared
from protot_jax import run_flags
from protot_jax.concepts import collect, judge, page, report_data
from protot_jax.concepts.ranking import RankBy
from protot_jax.concepts.results import ConceptReport, Statistic
from protot_jax.saved_run import DATA, TrainedModel

FOLDER = "concepts"
TWIN = "concepts.json"
PAGE = "concepts.html"
ANSWERS = "answers.jsonl"

flags.adopt_module_key_flags(run_flags)
# Flags of all commands share one table; `polyattn_jax.check` has `length`, `batch_size`, `seed`.
_SPLIT = flags.DEFINE_enum("split", "validation", list(SPLITS), "of the run's prepared data")
_TEXTS = flags.DEFINE_integer("texts", 4_000, "at most so many documents", lower_bound=2)
_LENGTH = flags.DEFINE_integer(
    "text_length", 32, "tokens of each, the first mark included", lower_bound=collect.LEAST + 1
)
_BATCH = flags.DEFINE_integer("text_batch", 64, "texts of one forward pass", lower_bound=1)
_TOP = flags.DEFINE_integer("top", 10, "texts and tokens shown of a prototype", lower_bound=1)
_RANK_BY = flags.DEFINE_enum("rank_by", "mean", ["mean", "sum"], "of the write gate over a text")
_JUDGE = flags.DEFINE_string("judge", "null", "null, local:FOLDER or cached:FILE")
_RESAMPLES = flags.DEFINE_integer(
    "resamples", 1_000, "bootstrap samples and permutations of each test", lower_bound=99
)
_SEED = flags.DEFINE_integer("analysis_seed", 0, "of permutations and samples", lower_bound=0)


def report(
    model: TrainedModel,
    data: Path,
    folder: Path,
    settings: report_data.ConceptConfig,
    judge: judge.Judge,
    *,
    batch_size: int = 64,
) -> ConceptReport:
    """Writes the files into an open work folder, and returns the data of the report.

    Args:
      model: to be read.
      data: the prepared folder of its run.
      folder: to write into.
      settings: of the analysis.
      judge: names the themes.
      batch_size: texts of one forward pass.

    Raises:
      UsageError: the model has no prototypes.
      BadInputError, CorruptError: the data cannot be used.
      StorageError: the folder cannot be written.
    """
    # A model without prototypes is refused before any work.
    _ = model.prototypes
    model.warn_of_packing()
    examples = Examples(
        open_prepared(data, tokenizer=model.tokenizer),
        settings.split,
        context=settings.length - 1,
        mode="truncate",
    )
    record_provenance(
        folder,
        collect_provenance(
            seeds={"run": model.seed, "analysis": settings.seed},
            dtype="float32",
            data={"documents": examples.prepared.manifest["documents_sha256"]},
            tokenizer=model.tokenizer.sha256,
        ),
    )
    activations = folder / collect.ACTIVATIONS
    texts = collect.collect(
        model, examples, activations, texts=settings.texts, batch_size=batch_size
    )
    made = report_data.build_report_data(model, texts, activations, settings, judge)
    write_json(folder / TWIN, made)
    provenance = read_json(folder / PROVENANCE_FILE)
    write_bytes(folder / PAGE, page.render(made, provenance=provenance).encode())
    return made


def format_report(made: ConceptReport) -> str:
    """The report in a few lines, for a terminal."""
    model, settings = made.model, made.settings
    half_lives = [each.half_life or float("inf") for each in made.prototypes]
    quartiles = np.quantile(half_lives, [0.0, 0.25, 0.5, 0.75, 1.0], method="nearest")
    lines = [
        f"{settings.texts:,} texts of the {settings.split} split, {settings.tokens:,} "
        f"tokens, perplexity {model.perplexity:.1f}; {model.layers} layers of "
        f"{model.prototypes} prototypes",
        "half-life {:.2f} to {:.2f} to {:.2f} to {:.2f} to {:.2f} tokens by quartiles".format(
            *quartiles
        ),
    ]
    lines += [
        "layer {layer} writes: top gate {top_1:.2f}, L1 ratio {l1_ratio:.1f}, Gini {gini:.2f}, "
        "entropy {entropy:.2f}, MI {mutual_information:.2f} (by chance "
        "{mutual_information_by_chance:.2f}), dead {dead}".format(
            layer=layer.layer, **dataclasses.asdict(layer.write)
        )
        for layer in made.layers
    ]
    lag, related = made.lag, made.half_life_repetition
    lines.append(f"read one token before write, lead over lag 0: {_tested(lag.lead)}")
    lines.append(f"the same less that of its neighbours' reads: {_tested(lag.own_lead)}")
    if lag.peaks_one_before is not None:
        peak = lag.lags[int(np.argmax(np.asarray(lag.mean, float)))]
        lines.append(
            f"{lag.peaks_one_before:.0%} of prototypes peak one token before write, the mean of "
            f"all at lag {peak:+d}"
        )
    lines.append(
        f"half-life and token repetition, within layers: Spearman {_tested(related.spearman)}"
    )
    return "\n".join(lines)


def _tested(result: Statistic) -> str:
    counts = f"{result.prototypes} prototypes, {result.texts:,} texts"
    if result.value is None:
        return f"none ({counts})"
    value, p, low, high = (
        "?" if number is None else f"{number:.3f}"
        for number in (result.value, result.p, result.low, result.high)
    )
    return f"{value} ({low} to {high}, p {p}; {counts})"


def settings_from_flags() -> report_data.ConceptConfig:
    """The flags as the settings of one analysis."""
    return report_data.ConceptConfig(
        split=_SPLIT.value,
        texts=_TEXTS.value,
        length=_LENGTH.value,
        top=_TOP.value,
        rank_by=cast(RankBy, _RANK_BY.value),
        resamples=_RESAMPLES.value,
        seed=_SEED.value,
    )


def main(arguments: cli.Arguments) -> None:
    """The command."""
    model, run = run_flags.load(), run_flags.run_folder()
    # A model without prototypes is refused before any work.
    _ = model.prototypes
    settings, named = settings_from_flags(), _JUDGE.value
    folder = arguments.workdir or run / FOLDER
    judged = judge.build_judge(named, answers=folder / ANSWERS)
    kind, _, place = named.partition(":")
    config = {
        "run": str(run),
        "seed": model.seed,
        "step": model.step,
        "judge": named,
        # A file that has grown makes another report.
        "answers": file_digest(Path(place))["sha256"] if kind == "cached" else "",
        "analysis": settings,
    }
    with open_workdir(folder, config, resume=arguments.resume) as work:
        if done := finish_time(work.path):
            print(f"finished {done}")
        else:
            report(model, run / DATA, work.path, settings, judged, batch_size=_BATCH.value)
            mark_finished(work.path)
            if isinstance(judged, judge.PromptedJudge):
                print(judged.summary())
        print(format_report(load_result(work.path / TWIN, ConceptReport)))
        print(work.path / PAGE)


if __name__ == "__main__":
    cli.app(main, workdir_required=False)
