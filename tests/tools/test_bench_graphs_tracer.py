"""The benchmark beside circuit-tracer, with our own graphs in the place of its process."""

import json
import sys

import numpy as np
import pytest

from lm_jax.errors import UsageError
from tools.bench import graphs_tracer
from tools.bench.workers.waiting import Waiting

# Run by `make test-all`.
pytestmark = pytest.mark.long

SMALL = ["--python=none", "--length=3", "--features=16", "--active=24", "--starts=2", "--repeats=2"]
SMALL += ["--batch", "64"]


@pytest.fixture
def as_theirs(monkeypatch):
    """Our process in the place of theirs, which keeps its graph by their names, plus `shift`."""

    class Theirs(Waiting):
        shift = 0.0

        def __init__(self, command, folder):
            super().__init__(command, "it")
            self.started = {"versions": {"circuit-tracer": "0"}}
            self.folder = folder

        def run(self, line="run"):
            for name in ("active", "adjacency"):
                array = np.load(self.folder / f"our_{name}.npy")
                np.save(self.folder / f"{name}.npy", array + array.dtype.type(self.shift))
            return super().run(line)

    real = graphs_tracer.starts

    def starts(python, folder):
        ours = [sys.executable, "-m", "tools.bench.workers.graph", str(folder)]
        theirs = {graphs_tracer.THEIRS: lambda: Theirs(ours, folder)}
        return real(python, folder) | theirs

    monkeypatch.setattr(graphs_tracer, "starts", starts)
    return Theirs


def test_first_and_later_graphs_are_timed(as_theirs, tmp_path, capsys):
    raw = tmp_path / "raw.json"
    assert graphs_tracer.main([*SMALL, f"--json={raw}"]) == 0
    found = json.loads(raw.read_text())["graphs"]
    assert [len(x) for x in found["first"].values()] == [2, 2, 2]
    assert [len(x) for x in found["later"].values()] == [2, 2]
    printed = capsys.readouterr().out
    assert "later graph, ours:" in printed and "times as fast" in printed


def test_a_batch_at_the_end_of_those_that_are_given_is_not_timed(as_theirs, capsys):
    assert graphs_tracer.main([*SMALL, "32"]) == 1
    assert "is the fastest; give smaller and larger ones, too" in capsys.readouterr().out


def test_other_graphs_are_not_timed(as_theirs, capsys):
    as_theirs.shift = 1.0
    assert graphs_tracer.main(SMALL) == 1
    assert "3 tokens: not timed, as features or entries" in capsys.readouterr().out


def test_a_process_that_ends_is_an_error_that_names_the_flag():
    with pytest.raises(UsageError, match="--python=x: it there did not go on; its error is above"):
        Waiting([sys.executable, "-c", ""], "--python=x: it there")
