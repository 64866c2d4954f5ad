"""Has the models continue the prompts, measures the texts, and asks the judges.

Besides what every study has, the work folder holds

    continuations/      the texts, a shard for each batch
    scores/             what language models that judge make of texts
    answers.jsonl       answers of a chat endpoint
    rows.parquet        every continuation with its measures
    verdicts.parquet    every verdict, controls too
"""

from collections.abc import Mapping
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from lm_jax.evaluate.pairwise import NULLS
from lm_jax.model.sampling import Sampling
from lm_jax.run.config import config_hash
from lm_jax.run.files import read_json
from lm_jax.run.tables import write_table
from lm_jax.study import Opened, Work
from lm_jax.text.prepared import MANIFEST
from protot_jax.studies.judging import continuations, judges, numbers, prompts, results
from protot_jax.studies.judging.continuations import Decoding
from protot_jax.studies.judging.prompts import Prompts
from protot_jax.studies.judging.settings import JudgingConfig
from protot_jax.training.run_options import load_each
from protot_jax.training.saved_run import DATA, TrainedModel, run_names

ROWS = "rows.parquet"
VERDICTS = "verdicts.parquet"


class Task(NamedTuple):
    """The models by name, the folders of their runs, the prompts, and the samplers."""

    models: Mapping[str, TrainedModel]
    runs: Mapping[str, Path]
    prompts: Prompts
    decodings: Mapping[Decoding, Sampling]


def inputs(config: JudgingConfig) -> Opened:
    """The models, the texts of the prompts, and what the judges read; loads models and prompts.

    Raises:
      UsageError: no run, one run twice, an unknown judge, or what no sampler or context can have.
      BadInputError, CorruptError: a run or the file of prompts cannot be used.
    """
    decodings: dict[Decoding, Sampling] = {"greedy": Sampling(), "sampled": config.sampling}
    read = [judges.inputs(name) for name in config.judge]
    runs, loaded = zip(*load_each(config.run, best=config.checkpoint == "best"), strict=True)
    models = {
        f"{name}, seed {model.seed}": model
        for name, model in zip(run_names(runs, loaded), loaded, strict=True)
    }
    if config.prompts:
        given = prompts.read(Path(config.prompts), count=config.count)
    else:
        given = prompts.held_out(
            loaded[0],
            runs[0],
            count=config.count,
            prompt_tokens=config.prompt_tokens,
            new_tokens=config.new_tokens,
            seed=config.seed,
        )
    # A prompt that is too long is refused before a folder is made.
    continuations.prompt_ids(models, given.prompts, config.new_tokens)
    identities = {"prompts": given.sha256}
    identities |= {name: model.identity.text for name, model in models.items()}
    for of_judge in read:
        identities |= of_judge
    task = Task(models, dict(zip(models, runs, strict=True)), given, decodings)
    return Opened(identities, task)


def _described(task: Task) -> tuple[results.Model, ...]:
    return tuple(
        model.described(results.Model, name=name, run=str(task.runs[name]))
        for name, model in task.models.items()
    )


def data_identity(manifest: Mapping[str, Any]) -> tuple[str, str]:
    """The documents and the tokenizer of prepared data; of an export, the documents of its run."""
    documents = manifest["notes"].get("of_documents_sha256", manifest["documents_sha256"])
    return documents, manifest["tokenizer_sha256"]


def _settings(config: JudgingConfig, task: Task) -> results.Settings:
    manifests = [read_json(run / DATA / MANIFEST) for run in task.runs.values()]
    same = {data_identity(one) for one in manifests}
    return results.Settings(
        task.prompts.source,
        len(task.prompts.prompts),
        task.prompts.sha256,
        task.prompts.skipped,
        config.new_tokens,
        dataclasses.asdict(task.decodings["sampled"]),
        config.seed,
        config.resamples,
        len(same) == 1,
    )


def measure(config: JudgingConfig, work: Work) -> results.JudgingSummary:
    """Generates what has not been generated, asks the judges, and writes both tables."""
    task: Task = work.loaded
    models, settings = _described(task), _settings(config, task)
    names = [*(f"null:{kind}" for kind in NULLS), *config.judge]
    # A judge that cannot be used is refused before anything is generated.
    with judges.opened(
        names, work.path, [one.checkpoint_sha256 for one in task.models.values()]
    ) as opened:
        # Texts depend on no judge, so that other judges keep them.
        generated = {"models": models, "settings": dataclasses.replace(settings, resamples=0)}
        texts = continuations.generate(
            task.models,
            task.prompts.prompts,
            task.decodings,
            dataclasses.replace(work, fingerprint=config_hash(generated)),
            new_tokens=config.new_tokens,
            seed=config.seed,
        )
        bleu = numbers.scored(task.prompts, texts)
        rouge = numbers.rouge_scored(task.prompts, texts)
        write_table(work.path / ROWS, numbers.rows(task.prompts, texts, bleu, rouge))
        by_decoding = {
            decoding: {name: [one.text for one in texts[decoding, name]] for name in task.models}
            for decoding in task.decodings
        }
        said = [judges.judge(each, task.prompts, by_decoding, seed=config.seed) for each in opened]
    write_table(work.path / VERDICTS, judges.table(said))
    return numbers.summarise(settings, models, task.prompts, texts, bleu, rouge, said)
