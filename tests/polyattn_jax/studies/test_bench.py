"""Timed decoding: what is counted, what is compared, and what is refused."""

import dataclasses

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lm_jax.errors import UsageError
from lm_jax.run.config import from_plain
from lm_jax.run.results import load_result
from lm_jax.study import frame
from polyattn_jax.recipes.decoding import state_attention
from polyattn_jax.recipes.decoding.sums import FeatureSums
from polyattn_jax.studies.bench import STUDY, numbers, report, run
from polyattn_jax.studies.bench.results import SOFTMAX, TURNS, BenchResult, BenchSummary
from polyattn_jax.studies.bench.settings import BenchConfig

WINDOW = "window:w=8,sinks=2"


def config(**changes):
    return dataclasses.replace(BenchConfig(recipes=(WINDOW,), lengths=(16, 32), turns=3), **changes)


def test_rates_are_medians_and_ratios_are_of_one_turn():
    """The machine slows down by ten in the second turn, which no ratio shows."""
    seconds = {SOFTMAX: [0.1, 1.0, 0.2], WINDOW: [0.05, 0.5, 0.05]}
    rows = [
        {"length": 16, "method": name, "turn": turn, "seconds": value, "state_bytes": len(name)}
        for name, values in seconds.items()
        for turn, value in reversed(list(enumerate(values)))
    ]
    table = pa.Table.from_pylist(rows, schema=TURNS)
    softmax, window = numbers.results(table, config(lengths=(16,)))
    assert numbers.rate(softmax) == pytest.approx((5, 1, 10))
    assert numbers.over(softmax, softmax) == (1, 1, 1)
    assert numbers.over(window, softmax) == pytest.approx((2, 2, 4))
    assert (window.method, window.state_bytes) == (WINDOW, len(WINDOW))


def test_a_run_counts_the_bytes_of_one_text(tiny, tmp_path):
    """Softmax keeps all, the window ten tokens and where they are, at any length."""
    settings = STUDY.settings("smoke", model=str(tiny), recipes=(WINDOW,))
    frame.execute(STUDY, from_plain(settings, BenchConfig), tmp_path / "run")
    summary = load_result(tmp_path / "run" / "summary.json", BenchSummary)
    model = run.lm_jax.load_pretrained(tiny)
    per_token = 2 * 4 * model.cfg.num_layers * model.cfg.num_kv_heads * model.cfg.head_dim
    sizes = {(r.length, r.method): r.state_bytes for r in summary.results}
    places = 4 * model.cfg.num_layers * 10
    assert sizes == {
        (16, SOFTMAX): per_token * 16,
        (32, SOFTMAX): per_token * 32,
        (16, WINDOW): per_token * 10 + places,
        (32, WINDOW): per_token * 10 + places,
    }
    assert summary.deviations[WINDOW] < 1e-4
    turns = pq.read_table(tmp_path / "run" / "turns.parquet").to_pylist()
    assert len(turns) == 2 * 2 * 3 and min(row["seconds"] for row in turns) > 0
    assert summary.compared == {WINDOW: 96}
    shown = report.conclusion(summary)
    assert shown.startswith("After 32 tokens window:w=8,sinks=2 decodes ")
    assert shown.endswith(
        f" keeps {100 * sizes[32, WINDOW] / sizes[32, SOFTMAX]:.2g} % of the bytes."
    )


@pytest.mark.parametrize(
    ("size", "words"),
    [(5, "5 % of the bytes"), (99, "99 % of the bytes"), (150, "1.5 times the bytes")],
)
def test_a_share_is_in_words_that_can_be_read(size, words):
    base = BenchResult(16, SOFTMAX, 100, (1.0,))
    assert report._share(dataclasses.replace(base, state_bytes=size), base) == words


def test_decoding_is_compared_where_keys_have_left_the_window(tiny, monkeypatch):
    """Without sums the text after the window is another; too few positions are refused."""
    model = run.lm_jax.load_pretrained(tiny)
    text = "elu1:w=70"
    assert run.compared(model, text) == 141
    monkeypatch.setattr(FeatureSums, "added", lambda *_: {})
    method = run._Method(model, state_attention.state_mixer(text))
    assert run._deviation(method, text, run.compared(model, text)) > 1e-3
    with pytest.raises(UsageError, match="on 301 tokens, and the model has 256 positions"):
        run.compared(model, "window:w=150")


def test_what_is_compared_notices_a_wrong_state(tiny, monkeypatch):
    model = run.lm_jax.load_pretrained(tiny)
    kept = state_attention._kept

    def without_the_last(held, *args):
        after = kept(held, *args)
        return after | {"place": jax.numpy.where(after["place"] == 5, 0, after["place"])}

    monkeypatch.setattr(state_attention, "_kept", without_the_last)
    # Another recipe than elsewhere, for programs are kept by what they are called with.
    text = "window:w=7,sinks=6"
    method = run._Method(model, state_attention.state_mixer(text))
    assert np.isfinite(off := run._deviation(method, text, 12))
    assert off > 1e-3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recipes": ("relu:p=2",)}, "cannot be decoded in constant memory here"),
        ({"recipes": ()}, "config.recipes must name one or more recipes, each once"),
        ({"recipes": (WINDOW, WINDOW)}, "each once"),
        ({"lengths": (16, 16)}, "config.lengths"),
        ({"turns": 2}, "config.turns = 2 must be at least 3"),
    ],
)
def test_settings_that_cannot_be_timed_are_refused(changes, words):
    with pytest.raises(UsageError, match=words):
        config(**changes)
