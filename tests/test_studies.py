"""What every study (`lm_jax.study`) does alike: the same tests over all declarations.

A study is run once in its mode "smoke"; what is changed afterwards is changed in a copy.
"""

import functools
import html
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from iaj import commands as front
from iaj.early import INPUTS_FILE
from lm_jax.checkpoint import manager
from lm_jax.console.config_files import fields
from lm_jax.errors import BadInputError, CorruptError, UsageError, WorkdirInUseError
from lm_jax.run.config import from_plain
from lm_jax.run.files import read_json, write_json
from lm_jax.run.results import load_result
from lm_jax.run.rows import RowStore
from lm_jax.run.user_cache import CACHE_VARIABLE
from lm_jax.run.workdir import open_workdir
from lm_jax.study import Training, command, frame
from lm_jax.train.metrics import TIMING
from tests import study_flags
from tests.browser import PageReader
from tests.polyattn_jax.conftest import haystack
from tests.polyattn_jax.conftest import tiny as tiny_with_head
from tests.protot_jax.small_runs import run, text

__all__ = ["haystack", "run", "text", "tiny_with_head"]

STUDIES = {
    " ".join(words): importlib.import_module(module).STUDY
    for words, module in front.COMMANDS.items()
    if front.is_study(module)
}
# Folders of the rows of a training.
METRICS = {"steps", "evaluations"}
# Each takes over ten seconds; `make test-all` has them.
LONG = {
    *("polyattn audit", "polyattn bench", "polyattn distill", "polyattn paper"),
    *("polyattn rankings", "protot concepts", "protot glue", "protot graph", "protot intervene"),
    *("protot perturb", "protot pretrain", "protot recall", "protot robustness"),
    *("sparse addition", "sparse pair", "sparse posttrain", "sparse transcoder"),
}
WRITTEN = {"config.json", "finished.json", "log.txt", "provenance.json", "report.html"}


def named(names):
    """Parameters of studies, of which those that take long are marked."""
    return [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in names]


def flags_of(study):
    """The module of a study's flags; None for one that needs none."""
    name = f"{study_flags.__name__}.{study.command.replace(' ', '_')}"
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


@pytest.fixture(scope="module")
def start(study, request, tmp_path_factory):
    """`start(folder, *flags)`: the study in its mode "smoke"; returns the exit code."""
    module, given = flags_of(study), []
    if module:
        given = module.flags(request, tmp_path_factory.mktemp("inputs"))

    def run(folder, *flags) -> int:
        config = [f"--config={study.config_name}:smoke", *given]
        return command.run(study, [f"iaj {study.command}", *config, f"--workdir={folder}", *flags])

    return run


@pytest.fixture(scope="module", params=named(STUDIES))
def study(request):
    """A study, as its command's words name it."""
    assert STUDIES[request.param].command == request.param
    return STUDIES[request.param]


@pytest.fixture(scope="module")
def finished(start, tmp_path_factory):
    """The folder of its smoke run."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert start(folder) == 0
    return folder


@pytest.fixture
def copied(study, finished, tmp_path):
    """A copy of that folder; in its place, where the study goes on nowhere else."""
    if not getattr(flags_of(study), "STAYS", False):
        yield shutil.copytree(finished, tmp_path / "run")
        return
    kept = finished.rename(tmp_path / "kept")
    yield shutil.copytree(kept, finished)
    shutil.rmtree(finished)
    kept.rename(finished)


def test_its_functions_are_there(study):
    for name in ("run", "report", *(["inputs"] if study.inputs else [])):
        assert callable(study.function(name))


def test_a_smoke_run_writes_what_every_study_writes(study, finished):
    held = {file.name for file in finished.iterdir()}
    assert {*WRITTEN, frame.SUMMARY} <= held
    assert isinstance(load_result(finished / frame.SUMMARY, study.summary), study.summary)
    provenance = read_json(finished / "provenance.json")
    assert provenance["dtype"] and not provenance["restarts"]
    has_seeds = {"seed", "seeds", "run_seed"} & vars(study.config()).keys()
    # A study without such a field may record seeds of its parts.
    assert provenance["seeds"] or not has_seeds
    inputs = read_json(finished / "finished.json")["inputs"]
    assert bool(inputs) == bool(study.inputs)
    assert provenance["data"].items() >= inputs.items()


def test_its_page_is_whole_and_needs_no_network(finished):
    text = (finished / frame.REPORT).read_text("utf-8")
    page = PageReader(text)
    ids, links = page.values("id"), page.values("href", "src")
    assert page.is_closed and len(ids) == len(set(ids))
    inside = {link for link in links if link[:1] == "#"}
    assert {link[1:] for link in inside} <= set(ids)
    # Other pages of the same folder.
    assert all((finished / link).is_file() for link in set(links) - inside)
    assert re.search(r'Content-Security-Policy" content="[^"]*default-src &#39;none&#39;', text)


def spoken(text):
    """Words of a text that may be wrapped or markup."""
    return " ".join(html.unescape(str(text)).split())


def test_page_and_terminal_open_with_the_same_sentence(study, finished):
    config = from_plain(read_json(finished / "config.json"), study.config)
    built = study.function("report")(
        config, load_result(finished / frame.SUMMARY, study.summary), finished
    )
    opening = re.match(
        r'<div class="verdict \w+" role="note">\s*<strong>(.*?)</strong>', built.lead[0]
    )
    assert opening and spoken(opening[1])[-1] in ".!?"
    assert spoken("\n".join(built.lines)).startswith(spoken(opening[1]))


def test_a_finished_run_says_so_with_the_same_text_and_changes_nothing(
    study, start, copied, capsys
):
    before = {file: file.read_bytes() for file in copied.glob("[!.]*.*") if file.name != "log.txt"}
    built = study.function("report")
    config = from_plain(read_json(copied / "config.json"), study.config)
    summary = load_result(copied / frame.SUMMARY, study.summary)
    assert start(copied) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"finished 20\S+", lines[0])
    assert "\n".join(lines[1:-1]) == "\n".join(built(config, summary, copied).lines)
    assert lines[-1] == f"report: {copied / frame.REPORT}"
    assert {file: file.read_bytes() for file in before} == before


def numbers(value):
    """A summary, without what some of them say of their run and how long it took."""
    if isinstance(value, list):
        return [numbers(each) for each in value]
    if not isinstance(value, dict):
        return value
    left_out = {"provenance", "seconds", "training_seconds"}
    return {name: numbers(each) for name, each in value.items() if name not in left_out}


def tables(folder):
    """All tables of a run by their place, but for shards; without how fast a training was."""
    found = {}
    for file in sorted(folder.rglob("*.parquet")):
        if not file.name.startswith("rows-"):
            table = pq.read_table(file)
            timed = [name for name in TIMING if name in table.column_names]
            found[str(file.relative_to(folder))] = table.drop_columns(timed)
    return found


def test_a_run_that_is_killed_resumes_to_equal_files(study, start, finished, tmp_path, monkeypatch):
    """After a unit; without units after a checkpoint of a training, or else before the summary."""
    done, again = [], []
    append, save = RowStore.append, manager.save

    def appended(seen, store, unit, rows):
        # Steps after the last checkpoint of a training are measured again.
        is_unit = unit[0] not in ("step", "evaluation")
        if is_unit and seen is done and done:
            raise RuntimeError("the power is gone")
        append(store, unit, rows)
        if is_unit:
            seen.append(unit)

    def saved(seen, place, state, **kwargs):
        if seen is done and done:
            raise RuntimeError("the power is gone")
        save(place, state, **kwargs)
        seen.append((place.relative_to(folder), int(state.step)))

    def no_summary(*_):
        raise RuntimeError("the power is gone")

    files = finished.rglob("rows-*.parquet")
    has_units = any(file.parent.name not in METRICS for file in files)
    has_checkpoints = not has_units and issubclass(study.config, Training)
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        if has_units:
            patch.setattr(RowStore, "append", lambda *given: appended(done, *given))
        elif has_checkpoints:
            patch.setattr(manager, "save", functools.partial(saved, done))
        else:
            patch.setattr(frame, "write_json", no_summary)
        assert start(folder) == 1
    assert not (folder / "finished.json").exists()
    monkeypatch.setattr(RowStore, "append", lambda *given: appended(again, *given))
    if has_checkpoints:
        monkeypatch.setattr(manager, "save", functools.partial(saved, again))
    assert start(folder) == 0
    parts = has_units or has_checkpoints
    assert bool(done) == bool(again) == parts and not set(again) & set(done)
    assert len(read_json(folder / "provenance.json")["restarts"]) == 1
    first, second = tables(finished), tables(folder)
    assert first.keys() == second.keys()
    for name, table in first.items():
        assert second[name].schema.equals(table.schema), name
        # A number that is not one is no equal of itself, but is written the same.
        assert repr(second[name].to_pylist()) == repr(table.to_pylist()), name
    first, second = (numbers(read_json(each / frame.SUMMARY)) for each in (finished, folder))
    assert first == second


def test_a_report_that_fails_leaves_the_run_unfinished(study, start, copied, monkeypatch, capsys):
    (copied / "finished.json").unlink()

    def fails(*_):
        raise RuntimeError("no page")

    function = type(study).function
    with monkeypatch.context() as patch:
        patch.setattr(
            type(study),
            "function",
            lambda self, name: fails if name == "report" else function(self, name),
        )
        assert start(copied) == 1
    assert "no page" in capsys.readouterr().err and not (copied / "finished.json").exists()
    assert start(copied) == 0


@pytest.mark.parametrize("study", ["sparse two_hop"], indirect=True)
def test_the_command_returns_what_its_report_says(study, start, copied, monkeypatch):
    function = type(study).function

    def chosen(self, name):
        found = function(self, name)
        if name != "report":
            return found
        return lambda *given: found(*given)._replace(exit_code=10)

    monkeypatch.setattr(type(study), "function", chosen)
    assert start(copied) == 10
    assert frame.execute(study, study.settings("smoke"), copied) is not None


def test_other_settings_are_refused(study, start, copied, capsys):
    settings = vars(study.config())
    number = next(name for name, value in settings.items() if type(value) is int)
    others = {"seeds": "(7,)", "seed": "7", number: settings[number] + 1}
    name = next(name for name in others if name in settings)
    assert start(copied, f"--config.{name}={others[name]}") == UsageError.exit_code
    error = capsys.readouterr().err
    assert f"holds a run with config.{name}" in error and "--resume=force" in error


@pytest.mark.parametrize(
    "study",
    named(
        name
        for name, each in STUDIES.items()
        if "allow_fallback" in each.may_change and hasattr(each.config, "allow_fallback")
    ),
    indirect=True,
)
def test_settings_that_change_no_number_may_change(start, copied, capsys):
    assert start(copied, "--config.allow_fallback=True") == 0
    assert capsys.readouterr().out.startswith("finished ")


def test_a_summary_that_is_damaged_is_named(start, copied, capsys):
    path = copied / frame.SUMMARY
    path.write_text(path.read_text("utf-8")[:-20], "utf-8")
    assert start(copied) == CorruptError.exit_code
    assert str(path) in capsys.readouterr().err


def test_a_summary_with_another_field_is_refused(start, copied, capsys):
    path = copied / frame.SUMMARY
    write_json(path, read_json(path) | {"invented": 1})
    assert start(copied) == CorruptError.exit_code
    assert "invented" in capsys.readouterr().err


@pytest.mark.parametrize(
    "study", named(name for name, each in STUDIES.items() if each.inputs), indirect=True
)
def test_the_numbers_of_other_inputs_are_refused(study, start, copied, capsys):
    marker = read_json(copied / "finished.json")
    name = next(iter(marker["inputs"]))
    marker["inputs"][name] = "0" * 64
    write_json(copied / "finished.json", marker)
    assert start(copied) == BadInputError.exit_code
    assert f"({name}: " in capsys.readouterr().err
    # The rows are of the inputs of now.
    assert start(copied, "--resume=force") == 0


@pytest.mark.parametrize(
    "study", named(name for name, each in STUDIES.items() if each.inputs), indirect=True
)
def test_an_interrupted_run_is_not_resumed_with_other_inputs(study, start, copied, capsys):
    (copied / "finished.json").unlink()
    provenance = read_json(copied / "provenance.json")
    name = next(iter(provenance["data"]))
    provenance["data"][name] = "0" * 64
    write_json(copied / "provenance.json", provenance)
    assert start(copied) == BadInputError.exit_code
    assert f"({name}: " in capsys.readouterr().err
    assert start(copied, "--resume=force") == 0


def test_a_folder_in_use_is_refused(start, copied, capsys):
    with open_workdir(copied, read_json(copied / "config.json")):
        assert start(copied) == WorkdirInUseError.exit_code
    assert "is in use by process" in capsys.readouterr().err


ASK_EARLY = """
import json, sys
from iaj import __main__ as front
found = []
for words, flags in json.loads(sys.argv[1]):
    sys.argv = ["iaj", *words, *flags]
    found.append(front.main())
print(json.dumps([found, "jax" in sys.modules]))
"""


def asked(folder, *commands):
    """The exit codes of commands without assets, and what they said, in a process without JAX."""
    done = subprocess.run(
        [sys.executable, "-c", ASK_EARLY, json.dumps(commands)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), CACHE_VARIABLE: str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    codes, imported = json.loads(done.stdout)
    assert not imported
    return codes, done.stderr.splitlines()


def test_a_folder_in_use_is_said_before_jax_is_imported(tmp_path):
    held = tmp_path / "held"
    with open_workdir(held, {}):
        commands = [(name.split(), [f"--workdir={held}"]) for name in STUDIES]
        codes, said = asked(tmp_path, *commands)
    assert set(codes) == {WorkdirInUseError.exit_code} and len(said) == len(STUDIES)
    assert all(f"{held} is in use by process" in line for line in said)


# What is read is chosen by other settings, or there is nothing.
READ_NOTHING = {"protot recall", "protot scores", "sparse addition", "sparse two_hop"}


def test_what_every_study_reads_and_is_not_there_is_said_before_jax_is_imported(tmp_path):
    stored = front.help_file(("x",)).parent / INPUTS_FILE
    reads = {name: table["reads"] for name, table in read_json(stored).items()}
    assert {name for name in STUDIES if not reads[name]} == READ_NOTHING
    commands, wanted = [], []
    for name, study in STUDIES.items():
        for field in reads[name]:
            if field["kind"] in ("model", "run", "file") and not field["suffix"]:
                flag = f"--{field['flags'][0]}"
                commands.append((name.split(), [f"{flag}=/no/such", "--config=mine.py"]))
                wanted.append(f"error: {flag}=/no/such: there is no such ")
            if field["assets"] and (values := field["values"].get(study.config_name)):
                names = field["assets"].get(values[0], ())
                commands.append((name.split(), []))
                wanted.append(f" {' '.join(names)}" if names else "run: iaj fetch")
    codes, said = asked(tmp_path, *commands)
    assert set(codes) == {BadInputError.exit_code}
    for want, line in zip(wanted, said, strict=True):
        assert want in line, line
        assert want.startswith("error: ") or "run: iaj fetch " in line


def test_a_typo_claims_no_folder(study, start, tmp_path, capsys):
    folder = tmp_path / "run"
    name, _ = next(iter(fields(study.settings("smoke"))))
    assert start(folder, f"--config.{name}x=1") == UsageError.exit_code
    assert f"did you mean {name!r}" in capsys.readouterr().err
    assert not folder.exists()
