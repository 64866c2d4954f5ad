"""The official submission files of GLUE: one TSV for each test set, and the archive to upload.

Each file has the header `index`, `prediction` and a line per example in the order of the test file.
Labels are spelled as the server wants them: words for QNLI, RTE, MNLI and AX, 0 and 1 for the other
classes, and a number in 0 to 5 for STS-B.
"""

from collections.abc import Mapping
from pathlib import Path
import zipfile

import numpy as np

from lm_jax.run.files import replace_file, storage_error, write_text
from protot_jax.studies.glue.tasks import SUBMISSION, Task

ARCHIVE = "submission.zip"


def file_text(task: Task, predictions: np.ndarray) -> str:
    """The content of one file, from classes or scores `[n]`."""
    lines = ["index\tprediction"]
    for index, value in enumerate(predictions.tolist()):
        spelled = task.labels[int(value)] if task.labels else f"{value:.3f}"
        lines.append(f"{index}\t{spelled}")
    return "\n".join(lines) + "\n"


def write_submission(
    folder: Path, predictions: Mapping[str, tuple[Task, np.ndarray]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Writes the files, and the archive if all eleven are there; returns the written and missing.

    Args:
      folder: folder of one model, created if needed.
      predictions: predictions by file name, as `tasks.SUBMISSION` lists them.

    Raises:
      StorageError: a file cannot be written.
    """
    written = tuple(name for name in SUBMISSION if name in predictions)
    missing = tuple(name for name in SUBMISSION if name not in predictions)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(folder, error) from error
    texts = {name: file_text(*predictions[name]) for name in written}
    for name, text in texts.items():
        write_text(folder / name, text)
    if not missing:
        with replace_file(folder / ARCHIVE) as file, zipfile.ZipFile(file, "w") as archive:
            for name, text in texts.items():
                # A fixed time, so that equal predictions give equal archives.
                archive.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)
    return written, missing
