"""A folder that an earlier version finished: graphs of two prompts, with their masses."""

import dataclasses
from pathlib import Path

import pyarrow.parquet as pq

from lm_jax.run.config import from_plain
from lm_jax.run.files import read_json
from sparse_jax.studies.graphs.run import fingerprint
from sparse_jax.studies.graphs.settings import GraphConfig

FOLDER = Path(__file__).parents[2] / "golden" / "studies" / "sparse_graph"


def test_its_rows_are_those_of_the_same_models_settings_and_prompts_now():
    """So that what it had measured is resumed, and not measured again or mixed with others."""
    config = from_plain(read_json(FOLDER / "config.json"), GraphConfig)
    inputs = read_json(FOLDER / "finished.json")["inputs"]
    models, transcoders = ({"model": inputs[f"{kind} model"]} for kind in ("models", "transcoders"))
    stored = pq.read_metadata(FOLDER / "masses.parquet").metadata[b"fingerprint"].decode()
    assert fingerprint(config, models, transcoders, inputs["prompts"]) == stored
    labelled = dataclasses.replace(config, labels="mine.json")
    assert fingerprint(labelled, models, transcoders, inputs["prompts"]) == stored
    assert fingerprint(config, {"model": "0" * 64}, transcoders, inputs["prompts"]) != stored
