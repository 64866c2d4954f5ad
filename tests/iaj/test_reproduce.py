"""`iaj reproduce`: a result is measured again and compared, number by number."""

import json

import pytest

from iaj import reproduce
from lm_jax.errors import EXIT_NO_GO
from lm_jax.run.files import file_digest

WRITE = (
    "import json, sys; json.dump({'loss': 1.01, 'seconds': 5.0}, "
    "open(sys.argv[1] + '/summary.json', 'w'))"
)


def store(root, tolerance, *, command=f'python -c "{WRITE}" {{workdir}}'):
    folder = root / "results" / "study" / "name"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({"loss": 1.0, "seconds": 2.0}))
    digest = file_digest(folder / "summary.json")["sha256"]
    (folder / "result.toml").write_text(
        f'title = "a loss"\n[reproduce]\ncommand = {json.dumps(command)}\n'
        f'device = "a core"\nminutes = 1\n'
        f'[[tolerance]]\nnumbers = "seconds"\nwhy = "machine"\ncompared = false\n'
        f'[[tolerance]]\nnumbers = "loss"\nwhy = "sums in another order"\nabsolute = {tolerance}\n'
        f'[files]\n"summary.json" = "{digest}"\n'
    )
    return folder


@pytest.mark.parametrize(("tolerance", "code"), [(0.02, 0), (0.005, EXIT_NO_GO)])
def test_the_command_is_run_and_its_numbers_compared(tmp_path, monkeypatch, capfd, tolerance, code):
    store(tmp_path, tolerance)
    monkeypatch.chdir(tmp_path)
    assert reproduce.main(["study/name", "--all"]) == code
    out = capfd.readouterr().out
    assert "1.01" in out and "sums in another order" in out
    assert f"{1 - bool(code)} of 1 values agree; 1 are not compared" in out
    assert ("differs" in out) == bool(code)


def test_the_list_has_every_result_with_its_cost(tmp_path, monkeypatch, capfd):
    store(tmp_path, 0)
    monkeypatch.chdir(tmp_path)
    assert reproduce.main(["--list"]) == 0
    (line,) = [each for each in capfd.readouterr().out.splitlines() if "study/name" in each]
    assert line.split() == ["study/name", "1", "a", "core", "a", "loss"]


def test_a_run_that_is_there_is_compared_without_running(tmp_path, monkeypatch, capfd):
    store(tmp_path, 0.02, command="python -c 1/0 {workdir}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"loss": 1.0, "seconds": 3.0}))
    monkeypatch.chdir(tmp_path)
    assert reproduce.main(["study/name", "--compare=run"]) == 0


def test_a_summary_of_another_name_is_now_summary_json(tmp_path, monkeypatch, capfd):
    folder = store(tmp_path, 0.02, command="python -c 1/0 {workdir}")
    file = folder / "result.toml"
    text = file.read_text()
    file.write_text(text.replace("minutes = 1", 'minutes = 1\nsummary = "loss.json"'))
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    for name, code in (("summary.json", 0), ("loss.json", EXIT_NO_GO)):
        values = {"loss": 1.0 + code, "seconds": 3.0}
        (tmp_path / "run" / name).write_text(json.dumps(values))
        assert reproduce.main(["study/name", "--compare=run"]) == code


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["study/nmae"], 3, "study/name"),
        ([], 2, "--list"),
        (["study/name", "--results=elsewhere"], 3, "--results"),
    ],
)
def test_a_wrong_name_or_folder_is_one_sentence(tmp_path, monkeypatch, capfd, argv, code, message):
    store(tmp_path, 0)
    monkeypatch.chdir(tmp_path)
    assert reproduce.main(argv) == code
    error = capfd.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_finished_folder_is_not_taken_for_a_new_run(tmp_path, monkeypatch, capfd):
    store(tmp_path, 0.02)
    monkeypatch.chdir(tmp_path)
    assert reproduce.main(["study/name"]) == 0
    assert reproduce.main(["study/name"]) == 3
    assert "--compare" in capfd.readouterr().err


def test_a_folder_without_a_summary_is_one_sentence(tmp_path, monkeypatch, capfd):
    store(tmp_path, 0)
    monkeypatch.chdir(tmp_path)
    assert reproduce.main(["study/name", "--compare=elsewhere"]) == 3
    assert "elsewhere/summary.json" in capfd.readouterr().err


def test_a_damaged_result_is_not_compared(tmp_path, monkeypatch, capfd):
    folder = store(tmp_path, 0)
    (folder / "summary.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert reproduce.main(["study/name"]) == 7
    assert "summary.json" in capfd.readouterr().err


def test_a_failing_command_ends_with_its_code(tmp_path, monkeypatch):
    store(tmp_path, 0, command='python -c "raise SystemExit(5)" {workdir}')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        reproduce.main(["study/name"])
    assert stopped.value.code == 5
