"""The benchmark of patching times only sweeps that give the loop's effects."""

import json
import math

import pytest

from tools.bench import patching as bench_patching

# Run by `make test-all`.
pytestmark = pytest.mark.long

SMALL = ["--layers=2", "--prompts=2", "--length=4", "--vocab=50", "--repeats=2", "--at_once", "3"]


def test_sweep_and_loop_are_timed_in_turns(tmp_path, capsys):
    raw = tmp_path / "raw.json"
    assert bench_patching.main([*SMALL, f"--json={raw}"]) == 0
    seconds = json.loads(raw.read_text())["seconds"]
    assert len(seconds["loop"]) == len(seconds["sweep"]["3"]) == 2
    printed = capsys.readouterr().out
    assert "18 heads x 2 prompts of 4 tokens" in printed and "at_once 3 " in printed


def test_other_effects_are_not_timed(monkeypatch, capsys):
    real = bench_patching.patching.head_effects
    monkeypatch.setattr(
        bench_patching.patching,
        "head_effects",
        lambda *pair, **options: math.nan + real(*pair, **options),
    )
    assert bench_patching.main(SMALL) == 1
    assert "at_once 3: not timed, as effects differ by nan, more than" in capsys.readouterr().out
