"""Folders of the models of a pair."""

from collections.abc import Sequence
from pathlib import Path

from lm_jax.assets import published
from lm_jax.errors import BadInputError
from lm_jax.run.results import load_result
from sparse_jax.studies.pair.results import PairSummary, ScoredModel, VariantResult
from sparse_jax.studies.posttrain.export import EXPORTED
from sparse_jax.studies.posttrain.results import ControlResult

SUMMARY = "summary.json"
# The folder of pretraining in the work folder, and in it that of the exported model.
DENSE, MODEL = "dense", "model"
# The folder of the texts, which published models lack.
TEXT = "text"


def model_folders(folder: Path) -> dict[str, Path]:
    """Folders of the dense, control and sparse model of a finished pair, by these names.

    The control and the sparse model have the first seed, and the sparse one has the first bound and
    no teacher.

    Raises:
      BadInputError: the folder has no summary of `iaj sparse pair`.
      CorruptError: its summary is damaged.
    """
    if not (folder / SUMMARY).is_file():
        raise BadInputError(
            f"{folder} has no {SUMMARY}; name the work folder of a finished iaj sparse pair"
            f"{published.hint(folder)}"
        )
    summary = load_result(folder / SUMMARY, PairSummary)
    models = exported_models(summary.controls, summary.variants)
    first = {each.role: folder / each.folder for each in reversed(models)}
    return {
        "dense": first["dense"],
        "control": first["control"],
        "sparse": first[summary.variants[0].variant],
    }


def text_files(folder: Path) -> tuple[Path, ...]:
    """The texts that the models of a pair were trained on; none where they are not there."""
    return tuple(sorted((folder / TEXT).glob("*.jsonl")))


def exported_models(
    controls: Sequence[ControlResult], variants: Sequence[VariantResult]
) -> tuple[ScoredModel, ...]:
    """All models of a pair: the dense one, the controls, the runs of each variant in order."""
    first = variants[0].variant
    return (
        ScoredModel("dense", str(Path(DENSE, MODEL))),
        *(
            ScoredModel("control", str(Path(first, each.folder, EXPORTED)), each.seed)
            for each in controls
        ),
        *(
            ScoredModel(
                variant.variant,
                str(Path(variant.variant, run.folder, EXPORTED)),
                run.seed,
                run.bound,
            )
            for variant in variants
            for run in variant.runs
        ),
    )
