"""Every benchmark can trace its turns."""

import importlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tools.bench import front

# The benchmarks that are commands.
TOOLS = sorted(
    path.stem
    for path in (Path(__file__).parents[2] / "tools" / "bench").glob("*.py")
    if "def main(" in path.read_text("utf-8") and path.stem != "front"
)


def measure(arguments, record):
    """Two programs in turns."""
    x = jnp.ones((arguments.width,) * 2)

    @jax.jit
    @jax.named_scope("mlp")
    def one(x):
        return x @ x

    @jax.jit
    @jax.named_scope("attention")
    def other(x):
        return (x @ x).sum(0)

    runs = {
        name: lambda fn=fn: jax.block_until_ready(fn(x))
        for name, fn in (("one", one), ("other", other))
    }
    return record.keep("seconds", front.timed("two programs", runs, arguments.repeats))


def main(argv):
    parser = front.parser("bench.toy", __doc__, repeats=3)
    parser.add_argument("--width", type=int)
    return front.run(measure, parser, argv)


def test_the_requested_turns_are_traced(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--width=32", "--profile=2:3"]) == 0
    folder = Path("runs/bench_toy/profile/plugins/profile/steps_2_3")
    assert f"profile: {folder}" in capsys.readouterr().err
    summary = json.loads((folder / "scopes.json").read_text())
    assert summary["steps"] == 2
    spent = {
        (program, scope)
        for program, by_scope in summary["seconds"].items()
        for scope, own in by_scope.items()
        if own["forward"]
    }
    assert spent >= {("jit_one", "mlp"), ("jit_other", "attention")}
    assert list(folder.glob("*.xplane.pb"))


def test_without_the_flag_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["--width=32"]) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("turns", "message"),
    [("4:2", "is not FIRST:LAST"), ("0:1", "is not FIRST:LAST"), ("2:4", "the last step is 3")],
)
def test_turns_beyond_the_last_are_refused(turns, message, capsys):
    assert main(["--width=32", f"--profile={turns}"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", TOOLS)
def test_every_benchmark_takes_the_flag(name, capsys):
    tool = importlib.import_module(f"tools.bench.{name}")
    with pytest.raises(SystemExit) as ended:
        tool.main(["--help"])
    assert ended.value.code == 0 and "--profile FIRST:LAST" in capsys.readouterr().out
    assert tool.main(["--profile=4:2"]) == 2
