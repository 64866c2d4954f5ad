"""A run is kept in results/ with its command; what was written by hand stays."""

import pytest

from iaj import reproduce
from lm_jax.run.files import write_json
from lm_jax.run.provenance import Provenance, collect_provenance
from lm_jax.run.stored_results import load_stored
from tools import keep_result


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(keep_result, "ROOT", tmp_path)
    monkeypatch.setattr(keep_result, "RESULTS", tmp_path / "results")
    folder = tmp_path / "run"
    folder.mkdir()
    write_json(folder / "summary.json", {"loss": 1.0})
    start = vars(collect_provenance()) | {
        "command": "python -m sparse_jax.pair.__main__ --workdir=runs/pair --resume=force --x=1"
    }
    write_json(folder / "provenance.json", Provenance(**start))
    return folder


ARGUMENTS = ["--title=a loss", "--minutes=3", "--device=two cores"]


def test_a_run_is_kept_with_the_command_that_makes_it_again(run, tmp_path):
    assert keep_result.main([str(run), "study/name", *ARGUMENTS]) == 0
    kept = load_stored(tmp_path / "results", "study/name")
    assert kept.changed_files() == [] and kept.summary() == {"loss": 1.0}
    again = kept.description.reproduce
    assert again is not None and again.minutes == 3
    assert again.command == "python -m sparse_jax.pair --workdir={workdir} --x=1"


def test_a_run_that_is_kept_again_keeps_the_tolerances(run, tmp_path):
    keep_result.main([str(run), "study/name", *ARGUMENTS])
    file = tmp_path / "results" / "study" / "name" / "result.toml"
    section = '[[tolerance]]\nnumbers = "loss"\nwhy = "seeds"\nabsolute = 0.1\n\n[files]'
    file.write_text(file.read_text().replace("[files]", section))
    write_json(run / "summary.json", {"loss": 1.05})
    assert keep_result.main([str(run), "study/name", *ARGUMENTS]) == 0
    kept = load_stored(tmp_path / "results", "study/name")
    assert kept.changed_files() == [] and kept.summary() == {"loss": 1.05}
    assert [each.numbers for each in kept.description.tolerance] == ["loss"]


def test_a_summary_of_another_name_is_kept_and_found_again(run, tmp_path):
    (run / "summary.json").rename(run / "comparison.json")
    arguments = [str(run), "study/name", *ARGUMENTS, "--summary=comparison.json"]
    assert keep_result.main(arguments) == 0
    kept = load_stored(tmp_path / "results", "study/name")
    assert kept.changed_files() == [] and kept.summary() == {"loss": 1.0}
    assert kept.description.reproduce is not None
    assert kept.description.reproduce.summary == "comparison.json"


def test_parts_of_a_large_summary_are_kept_and_compared_alone(run, tmp_path, capsys):
    write_json(run / "summary.json", {"loss": 1.0, "texts": ["a"] * 9})
    arguments = [str(run), "study/name", *ARGUMENTS]
    assert keep_result.main([*arguments, "--parts", "loss"]) == 0
    kept = load_stored(tmp_path / "results", "study/name")
    assert kept.changed_files() == [] and kept.summary() == {"loss": 1.0}
    compared = ["study/name", f"--results={tmp_path / 'results'}", f"--compare={run}"]
    assert reproduce.main(compared) == 0
    assert "1 of 1 values agree" in capsys.readouterr().out
    assert keep_result.main([*arguments, "--parts", "los"]) == 3
    assert "has no los" in capsys.readouterr().err


def test_what_is_missing_is_one_sentence(run, capsys):
    assert keep_result.main([str(run), "study/name"]) == 2
    assert "--title, --minutes, --device" in capsys.readouterr().err
    (run / "summary.json").unlink()
    assert keep_result.main([str(run), "study/name", *ARGUMENTS]) == 3
    assert "summary.json" in capsys.readouterr().err
