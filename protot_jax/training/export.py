"""Exports a trained model as a small folder that commands read in place of its run.

    iaj protot export --run=runs/speeches --workdir=models/speeches
    iaj protot export --run=runs/speeches --run_seed=1 --documents=500 --workdir=models/speeches_1
    iaj protot export --run=runs/whole --dtype=bfloat16 --workdir=models/whole

`--workdir` is a new folder, a fraction of a run in size, with

    model.safetensors   the weights of one seed, by `blocks/mixer/values`-like names
    config.json         the settings of its training
    summary.json        its perplexities
    README.md           the model card
    data/               tokenizer, and the first `--documents` of validation and of test text
    export.json         sizes and sha256 of all files, versions of training; written last

`iaj protot concepts --run=models/speeches`, and the other commands that take `--run`, need no more,
but for `robustness` without `--sentences`, which reads the corpus itself. Without training text the
model cannot be trained further, nor `concepts --compare=sae:` train on it. `iaj sparse` reads the
weights of `--checkpoint=best` alone. `--dtype=bfloat16` halves the file: matrices are rounded, as
the passes of a run in bfloat16 read them, and not as its updates add to them. The texts have the
licence of their corpus: publish them by it, or export with `--documents=0`; then `concepts`,
`intervene` and `judge` have none to read.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np

from lm_jax.console import cli
from lm_jax.errors import BadInputError
from lm_jax.model.decoder import param_spec
from lm_jax.model.params import by_path
from lm_jax.run.config import to_plain
from lm_jax.run.files import (
    check_new,
    new_folder,
    to_jsonable,
    write_json,
    write_manifest,
    write_text,
)
from lm_jax.run.finished import is_finished
from lm_jax.run.provenance import collect_provenance, read_provenance
from lm_jax.run.results import load_result
from lm_jax.run.settings import at_least
from lm_jax.run.workdir import CONFIG_FILE
from lm_jax.study.frame import SUMMARY
from lm_jax.text.exports import export_held_out
from lm_jax.text.prepared import open_prepared
from lm_jax.weights import card as cards
from lm_jax.weights.safetensors import write_tensors
from protot_jax.training.card import card
from protot_jax.training.exported import FORMAT, WEIGHTS, is_exported
from protot_jax.training.pretrain import casts
from protot_jax.training.results import PretrainSummary
from protot_jax.training.run_options import RunOptions
from protot_jax.training.saved_run import DATA, TrainedModel

# Of the run's provenance; its command names folders of the machine that trained.
_OF_TRAINING = ("start", "git", "packages", "device")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """The model, and how much held-out text goes with it.

    Attributes:
      documents: documents of validation text, and of test text.
      dtype: precision of matrices in the file; bfloat16 rounds them as training does.
    """

    documents: Annotated[int, at_least(0)] = 2000
    dtype: Literal["float32", "bfloat16"] = "float32"


def export(
    run: Path,
    model: TrainedModel,
    folder: Path,
    *,
    documents: int,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> dict[str, Any]:
    """Writes the new folder of a model, and returns its manifest, but for the digests of files.

    Args:
      run: the work folder that the model was loaded from, of a run that has ended.
      model: the model; its seed and checkpoint are exported.
      folder: a folder that does not exist yet.
      documents: the most documents of validation, and of test, that are written with it.
      dtype: dtype of the parameters that `pretrain.casts` selects; the others stay in float32.
        Whoever reads the folder has float32 arrays either way.

    Raises:
      BadInputError: `folder` exists, or the run has not ended or is an export itself.
      CorruptError: a file of the run is damaged.
      StorageError: `folder` cannot be written; then it does not exist.
    """
    if is_exported(run):
        raise BadInputError(f"{run} is an exported model already; copy it, or name its run")
    # A run that was extended keeps the summary of its earlier end.
    if not is_finished(run):
        raise BadInputError(f"{run} has not ended; start the run again, so that it ends")
    whole = load_result(run / SUMMARY, PretrainSummary)
    (own,) = (each for each in whole.seeds if each.seed == model.seed)
    summary = dataclasses.replace(whole, seeds=(own,))
    config = dataclasses.replace(model.config, seeds=(model.seed,))
    trained = read_provenance(run)
    provenance = collect_provenance(
        seeds={"run": model.seed},
        dtype="float32",
        data={"checkpoint": model.sha256},
        tokenizer=model.tokenizer.sha256,
    )
    with new_folder(folder) as draft:
        specs = by_path(param_spec(model.cfg, model.mixer))
        tensors = {
            name: np.asarray(leaf.astype(dtype) if casts(name, specs[name]) else leaf)
            for name, leaf in by_path(model.params).items()
        }
        write_tensors(draft / WEIGHTS, tensors, {"step": str(model.step)})
        write_json(draft / CONFIG_FILE, to_plain(config))
        write_json(draft / SUMMARY, summary)
        which = "best" if model.step == own.best.step else "last"
        write_text(draft / cards.CARD, card(config, summary, exported=which))
        data = open_prepared(run / DATA, tokenizer=model.tokenizer)
        held_out = export_held_out(data, draft / DATA, documents=documents)
        content = {
            "seed": model.seed,
            "step": model.step,
            "best_step": own.best.step,
            "last_step": own.last.step,
            "dtype": dtype,
            "documents": {split: size["documents"] for split, size in held_out["splits"].items()},
            "provenance": to_jsonable(provenance),
            "trained": {name: to_jsonable(getattr(trained, name)) for name in _OF_TRAINING},
        }
        write_manifest(draft, FORMAT, content)
    return content


def main(arguments: cli.Arguments) -> None:
    """The command."""
    options, folder = arguments.options, arguments.folder
    check_new(folder)
    model = options.load()
    content = export(
        options.run_folder, model, folder, documents=options.documents, dtype=options.dtype
    )
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    parameters = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    print(
        f"{folder}: {parameters:,} parameters of seed {content['seed']} after step "
        f"{content['step']:,}, {content['documents']['validation']:,} documents of validation and "
        f"{content['documents']['test']:,} of test text, {options.dtype}, {size / 1e6:,.1f} MB"
    )


if __name__ == "__main__":
    cli.app(main, options=Options)
