"""Runs whose loss was no longer finite, as a study, a search and fine-tuning record them.

A run that diverges does not end them: its learning rate counts as worse than all others.
"""

import os
from pathlib import Path

from lm_jax.errors import DivergedError

# Beside the training loop's own `diverged.json`, which has the step and its documents.
DIVERGED = "divergence.json"


def reason(error: DivergedError, folder: Path) -> str:
    """The message of the error without the run's folder, which may be moved."""
    return str(error).replace(f"{folder}{os.sep}", "")
