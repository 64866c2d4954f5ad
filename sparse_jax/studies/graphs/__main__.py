"""Draws attribution graphs: what features of a transcoder, errors and tokens cause in a prompt.

    iaj sparse graph --model=runs/pair/dense/model --transcoder=runs/clt/transcoder \\
        --prompt="When Mary and John went to the park, Mary gave a ball to" --workdir=runs/graph
    iaj sparse graph --model=smollm2 --transcoder=runs/smollm2_clt/transcoder \\
        --prompts=mine.jsonl --edge_threshold=0.98 --workdir=runs/graphs
    iaj sparse graph --model=smollm2 --neurons --prompt="The capital of France is" \\
        --workdir=runs/neurons
    iaj sparse graph --dense=runs/dense/model --dense_transcoder=runs/clt_dense/transcoder \\
        --sparse=runs/sparse/model --sparse_transcoder=runs/clt_sparse/transcoder \\
        --workdir=runs/compared

After section 4.3 of "Sparse Attention Post-Training". Each edge comes with the heads, and the pairs
of a query and a key, that carry it. With --neurons the features are
the neurons of the model's own MLPs, which need no training and are no transcoder's: most are active
on every token. With --dense and --sparse two models are compared on the same
prompts, ten of four kinds if none is named. A line of a .jsonl file is

    {"prompt": "...", "targets": [" John"], "kind": "ioi", "slug": "mary"}

where all but the prompt may be left out. Prompts with the same "meaning" say the same in other
words; whether the same heads compute them is measured too (`stability`). Labels of features come
from a file or from a judge.
`study.py` lists the files of the work folder. The same command resumes a killed run, which ends
with the same numbers.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, cast

from ml_collections import ConfigDict

from lm_jax.run import cli
from lm_jax.run.config import from_plain
from lm_jax.run.finished import finish_time, is_finished, mark_finished
from lm_jax.run.results import load_result
from lm_jax.run.settings import CommandOptions, Flag
from lm_jax.run.workdir import open_workdir
from sparse_jax.studies.graphs import inputs, study
from sparse_jax.studies.graphs.config import GraphConfig
from sparse_jax.studies.graphs.report_text import format_summary
from sparse_jax.studies.graphs.results import GraphSummary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Models, transcoders and prompts; each sets a field of the config.

    Attributes:
      model: model: a folder, dense or sparse, a work folder, or a name of the manifest.
      transcoder: folder transcoder/ of iaj sparse transcoder.
      dense: dense model to compare with --sparse, like --model.
      dense_transcoder: transcoder of the dense model.
      sparse: sparse model to compare with --dense, like --model.
      sparse_transcoder: transcoder of the sparse model.
      neurons: take the neurons of the MLPs for features, without any transcoder.
      prompt: text of a prompt; may be repeated.
      target: one token whose logit is explained, with its leading space.
      prompts: file of prompts, .jsonl, or findings or rephrasings, which are shipped.
      labels: file of labels of the features of --model, .json.
      dense_labels: file of labels of the features of --dense.
      sparse_labels: file of labels of the features of --sparse.
      judge: names what features stand for: null, local:FOLDER (a language model) or cached:FILE.
      edge_threshold: share of the edges' scores that is kept.
      unknown_origin: accept a transcoder that does not say of which model it is.
    """

    model: str | None = None
    transcoder: str | None = None
    dense: str | None = None
    dense_transcoder: str | None = None
    sparse: str | None = None
    sparse_transcoder: str | None = None
    neurons: bool = False
    prompt: Annotated[tuple[str, ...], Flag(repeated=True)] = ()
    target: Annotated[tuple[str, ...], Flag(repeated=True)] = ()
    prompts: str | None = None
    labels: str | None = None
    dense_labels: str | None = None
    sparse_labels: str | None = None
    judge: str | None = None
    edge_threshold: float | None = None
    unknown_origin: bool = False


# Options whose field of the config has another name.
_FIELDS = {"prompt": "prompts", "target": "targets", "prompts": "prompt_file"}


def settings(arguments: cli.Arguments) -> GraphConfig:
    """The config with the options in it."""
    config = cast(ConfigDict, arguments.config).copy_and_resolve_references()
    for name, value in vars(arguments.options).items():
        if value is not None and value is not False and value != ():
            config[_FIELDS.get(name, name)] = value
    return from_plain(config, GraphConfig)


def main(arguments: cli.Arguments) -> None:
    """The command."""
    config = settings(arguments)
    folder: Path = arguments.folder
    # Before the folder is made: what is refused leaves nothing behind.
    read = None if is_finished(folder) else inputs.read(config)
    with open_workdir(folder, config, resume=arguments.resume) as work:
        given = inputs.identify(config)
        done = finish_time(work.path, given)
        if not done:
            study.run(config, read or inputs.read(config), work.path)
            mark_finished(work.path, given)
        summary = load_result(work.path / study.SUMMARY, GraphSummary)
    print(*[f"finished {done}"] * bool(done), format_summary(summary), sep="\n")
    print(f"report: {folder / study.REPORT}")


if __name__ == "__main__":
    cli.app(main, config="sparse/graph", config_class=GraphConfig, options=Options)
