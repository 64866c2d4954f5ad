"""Post-training in two processes on loopback: the same adapters, edges and control as in one."""

import textwrap

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest

from lm_jax.checkpoint.adapters import ADAPTER_FILE, load_adapters
from lm_jax.model.params import by_path
from lm_jax.run.files import read_json
from lm_jax.study import frame
import sparse_jax
from sparse_jax.studies.posttrain import export
from sparse_jax.studies.posttrain.task import CONTROL
from tests.lm_jax.weights.parity_pairs import end, launch, launch_pair
from tests.sparse_jax.small_runs import run_folder, save_base, write_text

pytestmark = pytest.mark.slow
COMMAND = "iaj sparse posttrain"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A config file whose mesh splits rows, and with them every large weight, over two devices."""
    folder = tmp_path_factory.mktemp("config")
    base, text = save_base(folder / "base"), write_text(folder / "text")
    path = folder / "config.py"
    path.write_text(
        textwrap.dedent(
            f"""
            from tests.sparse_jax.small_runs import settings

            def get_config():
                return settings({str(base)!r}, {str(text)!r}, mesh=(1, 2, 1), control=True)
            """
        )
    )
    return path


def test_two_processes_end_with_what_one_does(config, tmp_path):
    alone, pair = tmp_path / "alone", tmp_path / "pair"
    (code,), _, errs = end([launch(COMMAND, config, alone, devices=2)])
    assert code == 0, errs
    codes, outs, errs = end(launch_pair(COMMAND, config, pair))
    assert codes == [0, 0], errs
    assert ["against the control" in out for out in outs] == [True, False]

    target = run_folder(alone).relative_to(alone)
    for name in (target, target.with_name(CONTROL)):
        for table in (export.EDGES, export.WINDOWS):
            one, two = (pq.read_table(folder / name / table) for folder in (alone, pair))
            assert one.equals(two), (name, table)
    own = read_json(alone / frame.SUMMARY)["model_sha256"]
    one, two = (
        load_adapters(run_folder(folder) / ADAPTER_FILE, base_sha256=own)[0]
        for folder in (alone, pair)
    )
    result, want = (by_path(jax.tree.map(np.asarray, each)) for each in (two, one))
    for path, value in want.items():
        np.testing.assert_array_equal(result[path], value, err_msg=path)
    names = (export.PATTERNS, export.RESULT)
    for name in names:
        one, two = (read_json(run_folder(folder) / name) for folder in (alone, pair))
        assert one == two, name
    one, two = (read_json(folder / frame.SUMMARY) for folder in (alone, pair))
    assert one == two
    model = sparse_jax.load(run_folder(pair) / export.EXPORTED)
    assert model.numbers["steps"] == two["runs"][0]["steps"]
