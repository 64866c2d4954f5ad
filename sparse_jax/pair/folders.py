"""Folders of the models of a pair."""

from pathlib import Path

from lm_jax.errors import BadInputError
from lm_jax.run.results import load_result
from sparse_jax.export import EXPORTED
from sparse_jax.pair.results import PairSummary

SUMMARY = "summary.json"
# The folder of pretraining in the work folder, and in it that of the exported model.
DENSE, MODEL = "dense", "model"


def model_folders(folder: Path) -> dict[str, Path]:
    """Folders of the dense, control and sparse model of a finished pair, by these names.

    The control and the sparse model are those of the first seed; the sparse one has the first
    bound, without a teacher.

    Raises:
      BadInputError: the folder has no summary of `iaj sparse pair`.
      CorruptError: its summary is damaged.
    """
    if not (folder / SUMMARY).is_file():
        raise BadInputError(
            f"{folder} has no {SUMMARY}; name the work folder of a finished iaj sparse pair"
        )
    summary = load_result(folder / SUMMARY, PairSummary)
    plain = summary.variants[0]
    work = folder / plain.variant
    return {
        "dense": folder / DENSE / MODEL,
        "control": work / summary.controls[0].folder / EXPORTED,
        "sparse": work / plain.runs[0].folder / EXPORTED,
    }
