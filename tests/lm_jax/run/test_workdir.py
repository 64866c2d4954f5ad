"""A work folder belongs to one run and one config, and never holds half a file."""

import dataclasses
import errno
import json
import logging
import math
import os
from pathlib import Path
import signal
import subprocess
import sys
import tempfile
import warnings

import numpy as np
import pytest

from lm_jax.errors import BadInputError, CorruptError, StorageError, UsageError, WorkdirInUseError
from lm_jax.run import workdir
from lm_jax.run.files import read_json, write_json
from lm_jax.run.finished import NO_INPUTS, finish_time, mark_finished
from lm_jax.run.provenance import (
    Commit,
    _git,
    collect_provenance,
    read_provenance,
    record_provenance,
)
from lm_jax.run.workdir import CONFIG_FILE, log_file, open_workdir
from lm_jax.study import Work

ROOT = Path(__file__).parents[3]


def _open(path, config=None, **options):
    with open_workdir(path, config or {"lr": 1}, **options) as workdir:
        return workdir


def _start(code, *argv):
    return subprocess.Popen(
        [sys.executable, "-c", code, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_the_same_config_goes_on_and_another_is_refused_by_field(tmp_path):
    path = tmp_path / "run"
    config = {"lr": 1.0, "model": {"width": 8, "degrees": (2, 4)}}
    assert not _open(path, config).resumed
    assert _open(path, config).resumed
    other = {"lr": 2.0, "model": {"width": 8, "degrees": [2, 4]}}
    with pytest.raises(UsageError, match=r"holds a run with config\.lr = 1\.0, not 2\.0; choose"):
        _open(path, other)
    assert json.loads((path / "config.json").read_text())["lr"] == 1.0


@pytest.mark.parametrize("error", [UsageError, BadInputError])
def test_a_first_start_that_is_refused_leaves_the_folder_to_the_corrected_command(tmp_path, error):
    folder = tmp_path / "run"

    def start(folder, corpus, output=None):
        with open_workdir(folder, {"corpus": corpus}) as workdir:
            record_provenance(workdir.path, collect_provenance())
            (workdir.path / log_file(1)).write_text("of another process")
            if output:
                (workdir.path / output).mkdir()
            raise error("refused")

    with pytest.raises(error, match="refused"):
        start(folder, "mistyped")
    with open_workdir(folder, {"corpus": "right"}) as workdir:
        assert not workdir.resumed
    # A run that has begun is kept, and so is one that wrote something in its first start.
    with pytest.raises(error, match="refused"):
        start(folder, "right")
    with pytest.raises(error, match="refused"):
        start(tmp_path / "other", "right", output="data")
    for kept in (folder, tmp_path / "other"):
        assert read_json(kept / CONFIG_FILE) == {"corpus": "right"}


def test_force_takes_the_new_config_and_takes_back_the_finished_marker(tmp_path):
    path = tmp_path / "run"
    _open(path)
    assert finish_time(path, NO_INPUTS) is None
    mark_finished(path, NO_INPUTS)
    assert finish_time(path, NO_INPUTS)
    _open(path, resume="force")
    assert finish_time(path, NO_INPUTS), "the same config does not undo a finished run"
    _open(path, {"lr": 2}, resume="force")
    assert finish_time(path, NO_INPUTS) is None
    assert _open(path, {"lr": 2}).resumed
    assert "the stored config.lr = 1, not 2" in (path / "log.txt").read_text()


def test_a_field_that_may_change_is_no_other_run(tmp_path):
    path, free = tmp_path / "run", ("mesh", "save_every")
    config = {"lr": 1.0, "mesh": (2, 2, 1), "save_every": 5}
    _open(path, config, may_change=free)
    mark_finished(path, NO_INPUTS)
    assert _open(path, config | {"mesh": (-1, 1, 1)}, may_change=free).resumed
    assert finish_time(path, NO_INPUTS)
    assert json.loads((path / "config.json").read_text())["mesh"] == [-1, 1, 1]
    with pytest.raises(UsageError, match=r"config\.lr = 1\.0, not 2\.0; choose"):
        _open(path, {**config, "lr": 2.0, "mesh": (1, 1, 1)}, may_change=free)


def test_never_wants_a_new_folder(tmp_path):
    _open(tmp_path / "run", resume="never")
    with pytest.raises(UsageError, match="holds a run already"):
        _open(tmp_path / "run", resume="never")


def test_a_folder_of_other_things_is_refused_untouched(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match=r"holds 'thesis\.tex' but no config\.json"):
        _open(tmp_path)
    visible = [item.name for item in tmp_path.iterdir() if item.name[0] != "."]
    assert visible == ["thesis.tex"]


def test_a_file_a_missing_parent_and_a_broken_config_are_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        _open(tmp_path / "file")
    with pytest.raises(StorageError, match=r"absent is not there; make that folder first"):
        _open(tmp_path / "absent" / "run")
    _open(tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text("{")
    with pytest.raises(CorruptError, match=r"config\.json is not JSON"):
        _open(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert _open("new/deep/run").path == tmp_path / "new" / "deep" / "run"


@pytest.fixture
def unprivileged():
    """Gives up the superuser's rights, which no permission binds, for the length of a test."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield
    os.seteuid(user)


@pytest.fixture
def closed_folder():
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "inner").mkdir(mode=0o700)
        os.chmod(name, 0o555)
        yield Path(name)
        os.chmod(name, 0o700)


@pytest.mark.parametrize("place", ["run", "inner/run"])
def test_a_folder_that_cannot_be_written_is_refused_before_any_work(
    closed_folder, unprivileged, place
):
    if place == "inner/run" and os.access(closed_folder / "inner", os.W_OK, effective_ids=True):
        (closed_folder / "inner").chmod(0o000)
    with pytest.raises(StorageError, match="Permission denied"):
        _open(closed_folder / place)


def test_a_read_only_disk_is_refused_before_any_work(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StorageError, match="Read-only file system"):
        _open(tmp_path / "run")


HOLD = """
import sys, time
from lm_jax.run.workdir import open_workdir
with open_workdir(sys.argv[1], {"lr": 1}):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_refused_and_kill_9_frees_the_folder(tmp_path):
    path = tmp_path / "run"
    holder = _start(HOLD, path)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(WorkdirInUseError) as caught:
        _open(path)
    assert caught.value.exit_code == 6
    assert f"in use by process {holder.pid} on " in str(caught.value)
    with pytest.raises(WorkdirInUseError):
        _open(path, {"lr": 2}, resume="force")
    (path / ".summary.json.tmp").write_text("half")
    (path / ".data.tmp").mkdir()
    (path / ".data.tmp/part").write_text("half of a folder")
    holder.send_signal(signal.SIGKILL)
    holder.communicate(timeout=20)
    assert _open(path).resumed
    assert not list(path.glob(".*.tmp"))


def test_the_lock_ends_with_its_context_even_by_an_exception(tmp_path):
    with pytest.raises(KeyError), open_workdir(tmp_path / "run", {"lr": 1}):
        raise KeyError("x")
    _open(tmp_path / "run")


def test_a_handler_that_was_there_shows_no_more_than_before(tmp_path):
    """absl puts one on standard error as soon as a library logs through it."""
    shown = []
    handler = logging.Handler()
    handler.emit = lambda entry: shown.append(entry.getMessage())
    logging.getLogger().addHandler(handler)
    try:
        with open_workdir(tmp_path / "run", {"lr": 1}):
            logging.getLogger("some.module").info("a detail")
            logging.getLogger("some.module").warning("a warning")
        assert handler.level == logging.NOTSET
    finally:
        logging.getLogger().removeHandler(handler)
    assert shown == ["a warning"]
    assert "a detail" in (tmp_path / "run" / "log.txt").read_text()


def test_the_log_holds_what_was_logged_inside_and_the_level_is_put_back(tmp_path):
    before = logging.getLogger().level
    with open_workdir(tmp_path / "run", {"lr": 1}):
        logging.getLogger("some.library").info("token \ud800 seen")
    logging.getLogger("some.library").error("outside")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "INFO some.library: token \\ud800 seen" in log
    assert "outside" not in log
    assert logging.getLogger().level == before


def test_json_has_no_nan_and_takes_arrays_and_dataclasses(tmp_path):
    @dataclasses.dataclass
    class Point:
        x: float

    path = tmp_path / "a.json"
    write_json(path, {"p": Point(math.nan), 1: (np.float32(0.5), np.arange(2)), "q": -math.inf})
    assert read_json(path) == {"p": {"x": None}, "1": [0.5, [0, 1]], "q": "-inf"}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("place", [(os, "fsync"), (Path, "replace"), (Path, "open")])
def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, code, place):
    path = tmp_path / "a.json"
    write_json(path, 1)

    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(*place, fail)
        with pytest.raises(StorageError, match=r"a\.json cannot be written") as caught:
            write_json(path, 2)
    assert caught.value.exit_code == 5
    assert read_json(path) == 1
    assert [item.name for item in tmp_path.iterdir()] == ["a.json"]


FILL = """
import resource, sys
from lm_jax.console import cli
from lm_jax.run.files import write_bytes
from lm_jax.run.workdir import open_workdir

def main(arguments):
    with open_workdir(arguments.workdir, {}) as workdir:
        write_bytes(workdir.path / "big.bin", b"old")
        # Past this size the kernel refuses to write, as a full disk does.
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        write_bytes(workdir.path / "big.bin", bytes(1_000_000))

cli.app(main)
"""


def test_a_full_disk_is_one_line_and_exit_5_and_the_old_file_stays(tmp_path):
    path = tmp_path / "run"
    process = _start(FILL, f"--workdir={path}")
    _, err = process.communicate(timeout=20)
    assert process.returncode == 5
    (line,) = err.splitlines()
    assert f"{path / 'big.bin'} cannot be written" in line
    assert (path / "big.bin").read_bytes() == b"old"
    assert not list(path.glob(".*.tmp"))
    assert "Traceback" in (path / "log.txt").read_text()


def test_a_log_that_cannot_be_written_stops_the_run(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with open_workdir(tmp_path / "run", {}), monkeypatch.context() as patch:
        patch.setattr(logging.FileHandler, "flush", fail)
        with pytest.raises(StorageError, match=r"log\.txt cannot be written"):
            logging.getLogger("x").info("message")


def test_provenance_says_what_a_repeat_needs_and_keeps_every_start(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "orig_argv", ["python", "prog", f"--workdir={tmp_path / 'my run'}"])
    entry = collect_provenance(
        seeds={"prompts": 3}, dtype="float32", data={"w.gguf": "ab"}, tokenizer="cd"
    )
    assert str(tmp_path) not in str(entry)
    assert "'--workdir=~/my run'" in entry.command
    assert entry.packages["pyarrow"]
    assert entry.seeds == {"prompts": 3}
    for seed in (1, 2, 3):
        record_provenance(tmp_path, dataclasses.replace(entry, seeds={"prompts": seed}))
    stored = read_provenance(tmp_path)
    assert stored.seeds == {"prompts": 1}
    assert [restart.seeds["prompts"] for restart in stored.restarts] == [2, 3]
    assert dataclasses.replace(stored.restarts[0], seeds=entry.seeds) == entry

    tree = read_json(tmp_path / "provenance.json")
    write_json(tmp_path / "provenance.json", tree | {"seeds": {"prompts": "three"}})
    with pytest.raises(CorruptError, match=r"provenance\.json.* seeds\.prompts"):
        record_provenance(tmp_path, entry)


def test_what_is_known_later_is_added_to_the_latest_start(tmp_path):
    entry = collect_provenance(data={"model": "ab"}, tokenizer="cd")
    record_provenance(tmp_path, entry)
    Work(tmp_path, "").record(data={"text": "ef"})
    record_provenance(tmp_path, entry)
    Work(tmp_path, "").record(data={"text": "12"}, tokenizer="34")
    stored = read_provenance(tmp_path)
    assert (stored.data, stored.tokenizer) == ({"model": "ab", "text": "ef"}, "cd")
    (again,) = stored.restarts
    assert (again.data, again.tokenizer) == ({"model": "ab", "text": "12"}, "34")


@pytest.mark.parametrize(
    ("given", "recorded"),
    [
        # Of `iaj` here, `sys.argv` has the file of the module that it runs.
        ("/venv/bin/python /venv/bin/iaj sparse transcoder", "iaj sparse transcoder"),
        ("/venv/bin/python -m iaj sparse transcoder", "iaj sparse transcoder"),
        ("python3 -m sparse_jax.transcoders", "python -m sparse_jax.transcoders"),
        ("python3 train.py", "python train.py"),
        ("python3 -S /venv/bin/iaj doctor", "iaj doctor"),
    ],
)
def test_provenance_has_the_command_that_was_given(given, recorded, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", [*given.split(), "--resume=auto"])
    assert collect_provenance().command == f"{recorded} --resume=auto"


def test_the_commit_is_that_of_the_code_and_none_outside_a_checkout(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", "-C", tmp_path, *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "provenance.py").write_text("1")
    assert _git(tmp_path) is None, "a file that git does not track has no commit"
    git("add", "provenance.py")
    git("commit", "-qm", "a")
    assert _git(tmp_path) == Commit(git("rev-parse", "HEAD"), dirty=False)
    (tmp_path / "provenance.py").write_text("2")
    assert _git(tmp_path).dirty


def test_the_device_is_named_only_where_jax_was_used(monkeypatch):
    import jax

    assert collect_provenance().device.count == jax.device_count()
    monkeypatch.delitem(sys.modules, "jax")
    assert collect_provenance().device is None


def test_the_fallbacks_of_a_run_are_in_its_provenance(tmp_path, monkeypatch):
    from iaj_kernels.core import dispatch

    # A function that an earlier run of the process traced is not traced again.
    earlier = "of an earlier run"
    monkeypatch.setattr(dispatch, "_FALLBACKS", [earlier])
    for start in range(2):
        with open_workdir(tmp_path / "run", {"lr": 1}) as work:
            record_provenance(work.path, collect_provenance())
            with dispatch.on(dispatch.Target("gpu", "some")), warnings.catch_warnings():
                warnings.simplefilter("ignore", dispatch.FallbackWarning)
                for _ in range(1 + start):
                    dispatch.choose("op", None, {"pallas": f"is out {start}; try xla", "xla": ""})
    said = "op: pallas is out {}; xla runs instead, which can be many times slower"
    stored = read_provenance(tmp_path / "run")
    first = (earlier, said.format(0))
    assert stored.fallbacks == first
    assert [each.fallbacks for each in stored.restarts] == [(*first, said.format(1))]
    assert said.format(1) in (tmp_path / "run" / "log.txt").read_text()
    # What is shown later in another process is not of the run.
    monkeypatch.setattr(dispatch, "_FALLBACKS", ["of another run"])
    _open(tmp_path / "run")
    assert read_provenance(tmp_path / "run") == stored


@pytest.mark.parametrize("name", ["log.txt", "config.json"])
def test_a_kill_before_a_file_of_the_first_start_leaves_the_folder_usable(
    tmp_path, monkeypatch, name
):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(workdir, "logging_to" if name == "log.txt" else "recording_fallbacks", killed)
        with pytest.raises(KeyboardInterrupt):
            _open(tmp_path / "run")
    assert not _open(tmp_path / "run").resumed


def test_a_kill_while_a_refused_start_is_undone_leaves_the_folder_usable(tmp_path, monkeypatch):
    unlink = Path.unlink

    def killed_after_one(path, *given, **options):
        unlink(path, *given, **options)
        if path.suffix == ".json":
            raise KeyboardInterrupt

    def refused():
        with open_workdir(tmp_path / "run", {"lr": 1}) as work:
            record_provenance(work.path, collect_provenance())
            raise UsageError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed_after_one)
        with pytest.raises(KeyboardInterrupt):
            refused()
    _open(tmp_path / "run")
