"""The benchmark of graphs times mediation only where both ways give the same shares."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from tools.bench import graphs as bench_graphs

# Run by `make test-all`.
pytestmark = pytest.mark.long

SMALL = ["--length=3", "--features=16", "--active=24", "--edges=2", "--repeats=2"]


def test_graph_and_both_ways_of_mediation_are_timed_in_turns(tmp_path, capsys):
    raw = tmp_path / "raw.json"
    assert bench_graphs.main([*SMALL, f"--json={raw}"]) == 0
    seconds = json.loads(raw.read_text())["seconds"]
    names = ("graph", "mediation", "closed_form", "removal", "all_pairs", "open_pairs")
    assert [len(seconds[name]) for name in names] == [2] * 6
    printed = capsys.readouterr().out
    assert "24 features, 3 tokens" in printed
    assert "2 edges by removal of each of 192 entries" in printed
    assert "1% of pairs open; ratios are over open_pairs" in printed


def test_rows_with_and_without_later_positions_are_timed_in_turns(capsys):
    asked = ["--rows", "--length=40", "--features=16", "--active=48", "--repeats=1"]
    assert bench_graphs.main(asked) == 0
    assert "rows of 48 features, 40 tokens, without the positions" in capsys.readouterr().out


def test_other_shares_are_not_timed(monkeypatch, capsys):
    real = bench_graphs.by_removal
    monkeypatch.setattr(bench_graphs, "by_removal", lambda *given: 1e-3 + np.asarray(real(*given)))
    assert bench_graphs.main(SMALL) == 1
    assert "not timed" in capsys.readouterr().out


@pytest.mark.parametrize("slip", [1e-3, np.nan])
def test_other_rows_are_not_timed(slip, monkeypatch, capsys):
    def filler(replacement, transcoder, table, step):
        rows = np.ones((2, 2)) + (slip if step < 40 else 0)
        return SimpleNamespace(of_features=lambda every: (rows, None))

    monkeypatch.setattr(bench_graphs, "RowFiller", filler)
    asked = ["--rows", "--length=40", "--features=16", "--active=48", "--repeats=1"]
    assert bench_graphs.main(asked) == 1
    assert "rows up to" in capsys.readouterr().out


def test_a_graph_of_neurons_is_timed_with_its_memory(monkeypatch, capsys):
    shape = bench_graphs.dataclasses.replace(bench_graphs.PAIR, num_layers=2, mlp_size=32)
    monkeypatch.setattr(bench_graphs, "SHAPE", shape)
    assert bench_graphs.main(["--neurons", "--layers=2", "--length=3", "--max_features=5"]) == 0
    assert "5 of 192 neurons, 3 tokens" in capsys.readouterr().out
