"""A trace holds the requested steps, with the parts of the model by name."""

import contextlib
import gzip
import io
import json

import jax
import jax.numpy as jnp
import pytest

from lm_jax.console import cli
from lm_jax.train import profiling
from lm_jax.train.profiling import SCOPES, Request
from tests.lm_jax.train import tiny_run
from tests.lm_jax.train import tiny_training as tiny


def train(folder, *, steps=None, **options):
    with profiling.request(steps):
        return tiny_run.train(folder, mesh=tiny.mesh(), validation=None, **options)


def opened(folder):
    (file,) = folder.glob("*.trace.json.gz")
    with gzip.open(file, "rt") as trace:
        return json.load(trace)["traceEvents"]


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """The result of a traced run, the folder of its trace, and what was printed."""
    folder = tmp_path_factory.mktemp("traced") / "run"
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        result = train(folder, steps=Request(3, 5))
    return result, folder / "profile/plugins/profile/steps_3_5", printed.getvalue()


def test_a_trace_holds_its_steps_and_every_part_of_the_model(traced):
    events = opened(traced[1])
    steps = [e["args"]["step_num"] for e in events if e.get("name") == "train"]
    assert steps == ["3", "4", "5"]
    parts = {e["args"]["scope"] for e in events if "hlo_op" in e.get("args", {})}
    assert parts >= set(SCOPES)
    backward = {e["args"]["scope"] for e in events if e.get("args", {}).get("pass") == "backward"}
    # The gradient by the logits is computed in the forward pass.
    assert backward >= {"mixer", "attention", "mlp"} and "optimizer" not in backward
    assert any(e["name"].startswith("mlp: ") for e in events if "name" in e)


def test_a_traced_run_ends_in_the_same_bits(traced, tmp_path):
    tiny.assert_bitwise(traced[0].state, train(tmp_path / "run").state)


def test_the_seconds_of_each_part_are_written_and_printed(traced):
    _, folder, error = traced
    summary = json.loads((folder / profiling.SUMMARY).read_text())
    assert summary["steps"] == 3
    (step,) = (own for name, own in summary["seconds"].items() if name.startswith("jit_step"))
    seconds = {scope: sum(own.values()) for scope, own in step.items()}
    assert list(seconds) == [*SCOPES, "other"] and min(seconds.values()) > 0
    largest, total = max(seconds, key=seconds.__getitem__), sum(seconds.values())
    text = f"{total:.3g} s in a step: {largest} {seconds[largest] / total:.1%}, "
    assert f"profile: {folder}\n" in error and text in error


def test_operations_are_named_after_the_innermost_scope():
    @jax.named_scope("mlp")
    def mlp(x, w):
        return jnp.tanh(x @ w)

    # A function of the name of a scope is none.
    @jax.jit
    def loss(x, w):
        with jax.named_scope("mixer"), jax.named_scope("unknown"):
            x = jax.lax.fori_loop(0, 3, lambda i, x: jnp.sin(x @ w), x)
        return jnp.sum(mlp(x, w) @ w)

    x = jnp.ones((24, 24))
    compiled = jax.jit(jax.grad(loss, argnums=1)).lower(x, x).compile()
    program = profiling.operations(compiled.as_text())
    result = {(each.scope, each.backward) for each in program.values()}
    assert result >= {("mixer", False), ("mlp", False), ("mlp", True), ("other", False)}
    assert not any(scope in ("loss", "unknown") for scope, _ in result)


def test_time_within_an_operation_is_counted_once(tmp_path):
    def event(op, start, duration, thread=1):
        arguments = {"hlo_op": op, "hlo_module": "jit_step", "run_id": "7"}
        timed = {"ph": "X", "pid": 1, "tid": thread, "ts": start, "dur": duration}
        return timed | {"name": op, "args": arguments}

    hlo = """
HloModule jit_step

%body (p: f32[2]) -> f32[2] {
  %copy.1 = f32[2]{0} copy(%p)
  ROOT %dot.1 = f32[2]{0} dot(%copy.1), metadata={op_name="jit(step)/mixer/attention/dot"}
}

%fused (x: f32[2]) -> f32[2] {
  %dot.2 = f32[2]{0} dot(%x, %x), metadata={op_name="jit(step)/transpose(jvp(mlp))/dot"}
  ROOT %add.2 = f32[2]{0} add(%dot.2, %x), metadata={op_name="jit(step)/loss/add"}
}

ENTRY %main () -> f32[2] {
  %while.1 = (s32[], f32[2]{0}) while(%t), body=%body, metadata={op_name="jit(step)/mixer/while"}
  %fusion.2 = f32[2]{0} fusion(%x), kind=kOutput, calls=%fused
  ROOT %add.3 = f32[2]{0} add(%x, %x)
}
"""
    events = [
        event("while.1", 0, 100),
        event("copy.1", 10, 5),
        event("dot.1", 20, 60),
        # On a thread of its own, with another operation within it.
        event("fusion.2", 30, 40, thread=2),
        event("add.3", 40, 10, thread=2),
        {"ph": "M", "name": "thread_name"},
    ]
    file = tmp_path / "host.trace.json.gz"
    with gzip.open(file, "wt") as written:
        json.dump({"traceEvents": events, "metadata": {}}, written)
    programs = {"jit_step": [{}, profiling.operations(hlo)]}
    seconds = profiling.name_operations(tmp_path, programs, steps=2)
    nothing = {"forward": 0.0, "backward": 0.0}
    assert list(seconds) == ["jit_step 2"]
    assert seconds["jit_step 2"] == dict.fromkeys((*SCOPES, "other"), nothing) | {
        "mixer": {"forward": 2.5e-6, "backward": 0.0},
        "attention": {"forward": 30e-6, "backward": 0.0},
        "mlp": {"forward": 0.0, "backward": 15e-6},
        "other": {"forward": 5e-6, "backward": 0.0},
    }
    named = [e["name"] for e in opened(tmp_path)]
    assert named[:2] == ["mixer: while.1", "mixer: copy.1"] and named[-1] == "thread_name"


def test_the_flag_is_of_training_commands_alone(tmp_path, capsys):
    calls = []

    def main(arguments):
        calls.append((arguments.profile, profiling.requested()))

    argv = ["prog", f"--workdir={tmp_path}", "--profile=2:4"]
    # This main trains nothing, which is refused at its end.
    assert cli.run(main, argv, training=True) == 2
    assert calls == [(Request(2, 4), Request(2, 4))] and profiling.requested() is None
    assert "nothing was traced" in capsys.readouterr().err
    assert cli.run(main, [*argv[:2], "--profile=4:2"], training=True) == 2
    assert cli.run(main, argv) == 2
    assert "--profile is not a flag" in capsys.readouterr().err
    assert len(calls) == 1
