"""The recipes as far as they go without Slurm or Docker: their syntax, options and commands.

The scripts are run by bash, with stand-ins for `srun`, `squeue` and `scontrol` on the path.
"""

import os
from pathlib import Path
import re
import subprocess
import tomllib

import pytest

from lm_jax.run import processes
from tests.test_commands import assert_is_a_command

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
SCRIPTS = sorted(path.name for path in (RECIPES / "slurm").glob("*.sbatch"))
SUPERVISE = RECIPES / "slurm" / "supervise.sh"

# Options of sbatch(1) and srun(1), with what they take.
NUMBER, NAME = r"[1-9]\d*", r"[\w%.-]+"
SBATCH = {
    "job-name": NAME,
    "nodes": NUMBER,
    "ntasks-per-node": NUMBER,
    "gpus-per-node": NUMBER,
    "cpus-per-task": NUMBER,
    "mem": r"\d+",
    "exclusive": "",
    "time": r"\d+:\d\d:\d\d",
    "signal": r"(?:B:)?(?:TERM|INT|USR1)@\d+",
    "requeue": "",
    "open-mode": "append|truncate",
    "output": NAME,
}
SRUN = {
    "cpus-per-task": NUMBER,
    "gpu-bind": "none",
    "kill-on-bad-exit": "[01]",
    "wait": r"\d+",
    "label": "",
}


def assert_options(words, known):
    """Each is `--name` or `--name=value`, known, with a value of its kind; returns them."""
    options = {}
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        assert word.startswith("--") and name in known, word
        assert re.fullmatch(known[name], value) and bool(equals) == bool(known[name]), word
        options[name] = value
    return options


@pytest.fixture
def path_with(tmp_path):
    """Puts stand-ins, scripts of bash, before all other programs."""

    def put(**programs):
        for name, body in programs.items():
            file = tmp_path / name
            file.write_text(f"#!/bin/bash\n{body}\n")
            file.chmod(0o755)
        path = f"{tmp_path}:{os.environ['PATH']}"
        return os.environ | {"PATH": path, "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "12"}

    return put


@pytest.mark.parametrize("file", [*SCRIPTS, SUPERVISE.name])
def test_bash_reads_every_script(file):
    subprocess.run(["bash", "-n", RECIPES / "slurm" / file], check=True)


@pytest.mark.parametrize("script", SCRIPTS)
def test_options_for_slurm(script):
    lines = (RECIPES / "slurm" / script).read_text("utf-8").splitlines()
    words = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    options = assert_options(words, SBATCH)
    # A process for each GPU, all of which it must see; the signal is one that commands handle.
    assert options["ntasks-per-node"] == options["gpus-per-node"] == "8"
    assert "requeue" in options and options["signal"].startswith("TERM@")
    # Slurm reads no option after the first command.
    commands = [i for i, line in enumerate(lines) if line and not line.startswith("#")]
    assert max(i for i, line in enumerate(lines) if line.startswith("#SBATCH")) < commands[0]


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_command_of_a_script_is_one_of_ours(script, path_with, tmp_path, capsys, monkeypatch):
    env = path_with(srun='printf "%s\\0" "$@" > "${0%/*}/words"')
    subprocess.run(
        ["bash", RECIPES / "slurm" / script, "--config.dtype=float32"],
        cwd=ROOT,
        env=env,
        check=True,
    )
    words = (tmp_path / "words").read_text().split("\0")[:-1]
    start = words.index("iaj")
    # Without it each task of srun has one core, however many the job asks for.
    assert assert_options(words[:start], SRUN)["cpus-per-task"] == "12"
    joined = []
    monkeypatch.setattr(processes, "join", lambda *args: joined.append(args))
    arguments = assert_is_a_command(words[start:], capsys)
    assert joined == [("auto", None, None)]
    assert arguments.workdir is not None
    # A flag of the user comes last, and wins.
    assert arguments.config.dtype == "float32"
    assert arguments.config.mesh == ((1, 1, 1) if script == "audit.sbatch" else (-1, 8, 1))


@pytest.mark.parametrize(
    ("codes", "ended", "starts", "requeued"),
    [
        ([0], 0, 1, False),
        ([3], 3, 1, False),
        ([75], 75, 1, True),
        # Killed, aborted, a folder still held; then it ends.
        ([137, 134, 6, 0], 0, 4, False),
        ([1, 1, 1, 1], 1, 3, False),
    ],
)
def test_the_supervisor(codes, ended, starts, requeued, path_with, tmp_path):
    (tmp_path / "codes").write_text("\n".join(map(str, codes)) + "\n")
    env = path_with(
        srun='cd "${0%/*}"; echo >> starts; exit $(sed -n "$(wc -l < starts)p" codes)',
        squeue="echo RUNNING",
        scontrol='echo "$@" > "${0%/*}/requeued"',
    )
    retries = {"PAUSE": "0", "RETRIES": "2" if ended == 1 else "5"}
    result = subprocess.run([SUPERVISE, "srun", "iaj"], env=env | retries, check=False)
    assert result.returncode == ended
    assert len((tmp_path / "starts").read_text()) == starts
    told = tmp_path / "requeued"
    assert told.exists() == requeued
    assert not requeued or told.read_text() == "requeue 7\n"


@pytest.mark.parametrize(("name", "code"), [("TERM", 75), ("USR1", 75), ("USR1", 137)])
def test_the_supervisor_passes_a_signal_on_and_waits_for_the_save(name, code, path_with, tmp_path):
    """The command has the supervisor signalled, and takes half a second to save.

    As srun(1) does, its stand-in forwards SIGUSR1 to the task, and kills it at a SIGTERM.
    """
    env = path_with(
        srun=f"""
            trap 'kill -USR1 $task' USR1
            trap 'kill -KILL $task' TERM
            (
                trap 'sleep 0.5; touch "${{0%/*}}/saved"; exit {code}' USR1
                sleep 0.2
                kill -{name} $PPID
                while :; do sleep 0.05; done
            ) &
            task=$!
            while kill -0 $task; do wait $task; code=$?; done
            exit $code
        """,
        squeue="echo RUNNING",
        scontrol='echo "$@" > "${0%/*}/requeued"',
    )
    result = subprocess.run([SUPERVISE, "srun", "iaj"], env=env, check=False, timeout=60)
    assert result.returncode == 75 and (tmp_path / "saved").exists()
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"


def test_a_cancelled_job_stays_cancelled(path_with, tmp_path):
    env = path_with(squeue="echo COMPLETING", scontrol='touch "${0%/*}/requeued"')
    result = subprocess.run([SUPERVISE, "bash", "-c", "exit 75"], env=env, check=False)
    assert result.returncode == 75
    assert not (tmp_path / "requeued").exists()


def test_the_image_has_all_that_the_wheel_is_built_from():
    text = (RECIPES / "Dockerfile").read_text("utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert "/tmp/source[cuda13]" in text
    assert any(
        each.startswith("jax[cuda13]")
        for each in project["project"]["optional-dependencies"]["cuda13"]
    )
    ignore = (RECIPES / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    kept = {line[1:] for line in ignore if line.startswith("!")}
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["packages"], *wheel["force-include"], "pyproject.toml", "README.md", "LICENSE"}
    assert needed | {"requirements/base.txt"} == kept
    assert all((ROOT / name).exists() for name in kept)
