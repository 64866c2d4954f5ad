"""A folder that an earlier version finished, of two prompts."""

from pathlib import Path

import pyarrow.parquet as pq

from lm_jax.run.config import from_plain
from lm_jax.run.files import read_json
from lm_jax.study import frame
from sparse_jax.studies.circuits import STUDY
from sparse_jax.studies.circuits.run import fingerprint
from sparse_jax.studies.circuits.settings import CircuitConfig

ROOT = Path(__file__).parents[4]
FOLDER = ROOT / "tests" / "golden" / "studies" / "sparse_circuits"


def test_rows_are_those_of_the_same_models_settings_and_prompts_now():
    """So that what was measured is resumed, and not measured again or mixed with others."""
    config = from_plain(read_json(FOLDER / "config.json"), CircuitConfig)
    models = {"dense": read_json(FOLDER / "finished.json")["inputs"]["dense"]}
    summary = frame.load_summary(STUDY, FOLDER)
    assert summary.config == config
    tasks = {task.name: task.sha256 for task in summary.tasks}
    stored = pq.read_metadata(FOLDER / "rows.parquet").metadata[b"fingerprint"].decode()
    assert fingerprint(config, models, tasks) == stored
    assert fingerprint(config, {"dense": "0" * 64}, tasks) != stored
