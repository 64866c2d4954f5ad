"""A transcoder trained in two processes on loopback: the same files and numbers as in one."""

import textwrap

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest

from lm_jax.run.files import read_json
from lm_jax.study import frame
from lm_jax.train.metrics import EVALUATIONS
from sparse_jax import transcoders
from sparse_jax.studies.transcoders import run
from tests.lm_jax.weights.parity_pairs import end, launch, launch_pair
from tests.sparse_jax.small_runs import save_base, write_text

pytestmark = pytest.mark.slow
COMMAND = "iaj sparse transcoder"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A config file whose mesh splits rows, and with them every large weight, over two devices."""
    folder = tmp_path_factory.mktemp("config")
    base, text = save_base(folder / "base"), write_text(folder / "text")
    path = folder / "config.py"
    path.write_text(
        textwrap.dedent(
            f"""
            from lm_jax.text.preparation import CorpusConfig
            from sparse_jax.studies.transcoders import STUDY
            from sparse_jax.transcoders.objective import Penalties

            def get_config():
                return STUDY.settings(
                    "",
                    model={str(base)!r},
                    corpus=CorpusConfig({str(text)!r}, "document", splits=(0.7, 0.3, 0.0)),
                    context=16,
                    features=48,
                    kind="batchtopk",
                    penalties=Penalties(active=4, active_start=12),
                    batch_size=8,
                    steps=3,
                    learning_rate=1e-2,
                    eval_every=3,
                    scale_batches=2,
                    score_prompts=2,
                    score_tokens=8,
                    score_features=16,
                    mesh=(1, 2, 1),
                )
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
    assert ["batchtopk transcoder of" in out for out in outs] == [True, False]
    # The same computation on two devices, whose sums are added in one order.
    for name in (run.SCALES, frame.SUMMARY):
        one, two = (read_json(root / name) for root in (alone, pair))
        assert one == two, name
    one, two = (pq.read_table(root / EVALUATIONS) for root in (alone, pair))
    assert one.equals(two)
    (own, _), (other, _) = (transcoders.load(root / run.TRANSCODER) for root in (alone, pair))
    jax.tree.map(np.testing.assert_array_equal, other.params, own.params)
