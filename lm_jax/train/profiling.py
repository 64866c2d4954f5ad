"""Profiles of chosen steps by `jax.profiler`, with the time of each part of the model.

    iaj protot pretrain ... --profile=20:24
    python -m tools.bench.train ... --profile=2:3

1. The trace begins before the first of the steps and ends after the last one, both times after the
   device has finished. Each step is an event `train` with its number.
2. An operation that the compiler calls `fusion.17` gets the name of the part that it belongs to:
   its `jax.named_scope` (`SCOPES`), from the compiled programs. An operation fused from several
   parts counts for the part of its result.
3. The seconds of each part are summed by program, forward and backward, and written beside the
   trace. An evaluation within the steps is a separate program.

In the folder of the run:

    profile/plugins/profile/steps_20_24/
        <host>.xplane.pb        the trace as TensorBoard and xprof read it
        <host>.trace.json.gz    the same for Perfetto, operations named by part
        scopes.json             the seconds of each part by program

docs/profiling.md shows how to open them.
"""

from collections.abc import Iterable, Iterator, Mapping
import contextlib
import contextvars
import dataclasses
import gzip
import itertools
import json
from pathlib import Path
import re
import sys
from typing import Any, Self

from lm_jax.errors import UsageError

FOLDER = "profile"
STEP = "train"
SUMMARY = "scopes.json"
SCOPES = ("embed", "mixer", "attention", "mlp", "dropout", "logits", "loss", "optimizer")
OTHER = "other"


@dataclasses.dataclass(frozen=True)
class Request:
    """The steps to trace, from `first` to `last` and both included, counted from 1.

    `folder` is where a command without a work folder writes.
    """

    first: int
    last: int
    folder: Path | None = None

    def __str__(self) -> str:
        return f"--profile={self.first}:{self.last}"


@dataclasses.dataclass(frozen=True)
class Trace:
    """A trace on disk: its folder, and its seconds as `name_operations` returns them."""

    folder: Path
    seconds: Mapping[str, Mapping[str, Mapping[str, float]]]

    def __str__(self) -> str:
        lines = [f"profile: {self.folder}"]
        for program, by_scope in self.seconds.items():
            sums = {scope: sum(by_pass.values()) for scope, by_pass in by_scope.items()}
            total = _total(by_scope)
            largest = sorted(sums.items(), key=lambda item: -item[1])
            parts = ", ".join(f"{scope} {own / total:.1%}" for scope, own in largest if own)
            lines.append(f"  {program}, {total:.3g} s in a step: {parts}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class _Pending:
    """A request, and its traces so far; None is a trace that another process writes."""

    steps: Request
    traces: list[Trace | None]


_pending: contextvars.ContextVar[_Pending | None] = contextvars.ContextVar("profile", default=None)


def parse(text: str | None, folder: Path | None = None) -> Request | None:
    """Parses `FIRST:LAST`; None for None.

    Raises:
      UsageError: it is not two whole numbers, the first at least 1 and not above the second.
    """
    if text is None:
        return None
    result = re.fullmatch(r"(\d{1,12}):(\d{1,12})", text)
    if not result or not 1 <= int(result[1]) <= int(result[2]):
        raise UsageError(
            f"--profile={text} is not FIRST:LAST, two step numbers from 1 on; write --profile=20:24"
        )
    return Request(int(result[1]), int(result[2]), folder)


@contextlib.contextmanager
def request(steps: Request | None) -> Iterator[None]:
    """Context in which every training loop traces these steps; its end prints the traces.

    Raises:
      UsageError: at the end, if no loop reached the steps.
    """
    pending = None if steps is None else _Pending(steps, [])
    token = _pending.set(pending)
    try:
        yield
    finally:
        _pending.reset(token)
    if pending is None:
        return
    if not pending.traces:
        raise UsageError(
            f"{steps}: nothing was traced, because no run reached these steps in this start; to "
            "trace a finished run, start it again in another --workdir"
        )
    for trace in filter(None, pending.traces):
        print(trace, file=sys.stderr)


def requested() -> Request | None:
    """The steps to trace, if any."""
    pending = _pending.get()
    return pending.steps if pending else None


class Tracer:
    """Starts and stops the trace of a loop; does nothing if none is requested."""

    def __init__(self, folder: Path, *, done: int, total: int, writes: bool = True) -> None:
        """Checks the request against the loop; a finished loop traces nothing.

        Args:
          folder: folder of the run.
          done: number of steps that are done.
          total: number of steps of the run.
          writes: False in a process that does not write the trace.

        Raises:
          UsageError: the run has no such steps, or they are done.
        """
        self._folder, self._writes = folder / FOLDER, writes
        # The folder of the current trace, and how many steps it holds.
        self._target: Path | None = None
        self._count = 0
        self._pending = _pending.get() if done < total else None
        if self._pending is None:
            return
        steps = self._pending.steps
        if steps.last > total:
            raise UsageError(f"{steps}: the last step is {total}; choose steps up to that")
        if steps.first <= done:
            raise UsageError(
                f"{steps}: {done} of {total} steps are done in {folder}; choose steps after "
                "those, or another --workdir"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        # The loop ended before the last of the steps.
        if self._target is not None:
            self._end(complete=kind is None)

    @contextlib.contextmanager
    def step(self, number: int, before: Any = ()) -> Iterator[None]:
        """Context of one step; `before` are the outputs of the step before it."""
        if self._pending is None:
            yield
            return
        import jax

        if number == self._pending.steps.first:
            if self._writes:
                jax.block_until_ready(before)
                self._begin()
            else:
                self._pending.traces.append(None)
        if self._target is None:
            yield
            return
        self._count += 1
        with jax.profiler.StepTraceAnnotation(STEP, step_num=number):
            yield

    def after(self, number: int, outputs: Any = ()) -> None:
        """Ends the trace if this was the last of its steps; `outputs` are those of the step."""
        if self._target is None or self._pending is None or number != self._pending.steps.last:
            return
        import jax

        jax.block_until_ready(outputs)
        self._end(complete=True)

    def _begin(self) -> None:
        import jax

        assert self._pending is not None
        steps = self._pending.steps
        name = f"steps_{steps.first}_{steps.last}"
        names = itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2)))
        within = self._folder / "plugins" / "profile"
        self._target = next(path for path in map(within.joinpath, names) if not path.exists())
        options = jax.profiler.ProfileOptions()
        # Otherwise every call of a Python function is an event, and these are most of the trace.
        options.python_tracer_level = 0
        options.session_id = self._target.name
        jax.profiler.start_trace(self._folder, profiler_options=options)

    def _end(self, *, complete: bool) -> None:
        import jax

        assert self._pending is not None and self._target is not None
        jax.profiler.stop_trace()
        folder, self._target = self._target, None
        if complete:
            seconds = name_operations(folder, _programs(), self._count)
            self._pending.traces.append(Trace(folder, seconds))


@dataclasses.dataclass(frozen=True)
class Operation:
    """Operation of a compiled program: its part, and whether it is of the backward pass.

    `control` marks an operation that only runs others, whose time counts in its place.
    """

    scope: str
    backward: bool
    control: bool


Program = Mapping[str, Operation]
_UNKNOWN = Operation(OTHER, backward=False, control=False)

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?\s([a-z][\w\-]*)\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_CALLED = re.compile(r"(?:body|condition|calls|to_apply)=%?([\w.\-]+)")
_SOURCE = re.compile(r'metadata=\{[^}]*op_name="([^"]*)"')
# A scope within transformations: `transpose(jvp(mlp))`. `jit(loss)` is a function's name instead.
_COMPONENT = re.compile(r"(?:(?:jvp|transpose|vmap|checkpoint|rematted_computation)\()*(\w+)\)*")
_CONTROL = frozenset({"while", "call", "conditional"})
_PRODUCTS = frozenset({"dot", "convolution", "custom-call"})


@dataclasses.dataclass(frozen=True)
class _Instruction:
    kind: str
    computation: str
    calls: tuple[str, ...]
    scope: str
    backward: bool


def operations(hlo: str) -> Program:
    """The operations of a compiled program by name, parsed from its HLO text.

    A fusion without a name has the part of its products, or of its result. An operation that the
    compiler added, such as a copy in a loop, has the part of the loop.
    """
    results: dict[str, _Instruction] = {}
    computation = ""
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header[1]
        elif matched := _INSTRUCTION.match(line):
            source = _SOURCE.search(line)
            scope, backward = _scope(source[1]) if source else (OTHER, False)
            results[matched[1]] = _Instruction(
                matched[2], computation, tuple(_CALLED.findall(line)), scope, backward
            )
    caller = {called: name for name, each in results.items() for called in each.calls}
    inside: dict[str, list[_Instruction]] = {}
    for each in results.values():
        inside.setdefault(each.computation, []).append(each)

    def owner(each: _Instruction) -> _Instruction:
        if each.scope == OTHER and each.kind == "fusion":
            (fused,) = (inside.get(name, []) for name in each.calls)
            products = [part for part in fused if part.kind in _PRODUCTS]
            named = (part for part in (*products, *reversed(fused)) if part.scope != OTHER)
            each = next(named, each)
        if each.scope == OTHER and each.computation in caller:
            outer = owner(results[caller[each.computation]])
            return dataclasses.replace(outer, backward=each.backward or outer.backward)
        return each

    return {
        name: Operation(own.scope, own.backward, each.kind in _CONTROL)
        for name, each in results.items()
        for own in [owner(each)]
    }


def _scope(path: str) -> tuple[str, bool]:
    """The innermost of `SCOPES` in the path of an operation, and whether it is of a gradient."""
    components = path.split("/")
    parts = [result[1] for part in components if (result := _COMPONENT.fullmatch(part))]
    scope = next((part for part in reversed(parts) if part in SCOPES), OTHER)
    return scope, any(part.startswith("transpose(") for part in components)


def _programs() -> dict[str, list[Program]]:
    """All compiled programs of this process, by the name of the module."""
    import jax

    results: dict[str, list[Program]] = {}
    for executable in jax.devices()[0].client.live_executables():
        for module in executable.hlo_modules():
            results.setdefault(module.name, []).append(operations(module.to_string()))
    return results


def name_operations(
    folder: Path, programs: Mapping[str, list[Program]], steps: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Names the operations of a trace by their part, and sums the seconds of each part per step.

    Args:
      folder: folder of the trace; its Perfetto file is rewritten, and `scopes.json` written.
      programs: the programs from `operations`, by the name of the module; of several with one name,
        the one with the traced operations is taken.
      steps: number of steps in the trace.

    Returns:
      "forward" and "backward" seconds of all threads and devices in a step, by program, longest
      first, and by part. Programs with the same name are numbered.
    """
    (file,) = folder.glob("*.trace.json.gz")
    with gzip.open(file, "rt", encoding="utf-8") as opened:
        trace = json.load(opened)
    runs: dict[tuple[str, Any], list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        arguments = event.get("args", {})
        if event.get("ph") == "X" and "hlo_op" in arguments:
            module, run = arguments.get("hlo_module", ""), arguments.get("run_id")
            runs.setdefault((module, run), []).append(event)
    seconds: dict[str, dict[str, dict[str, float]]] = {}
    for (module, _), events in runs.items():
        names = {event["args"]["hlo_op"] for event in events}
        known = programs.get(module, [{}])
        number = max(range(len(known)), key=lambda i: len(names & known[i].keys()))
        own = seconds.setdefault(
            f"{module} {number + 1}" if len(known) > 1 else module,
            {scope: {"forward": 0.0, "backward": 0.0} for scope in (*SCOPES, OTHER)},
        )
        for event, microseconds in _own_time(events):
            operation = known[number].get(event["args"]["hlo_op"], _UNKNOWN)
            direction = "backward" if operation.backward else "forward"
            event["args"] |= {"scope": operation.scope, "pass": direction}
            event["name"] = f"{operation.scope}: {event['name']}"
            if not operation.control:
                own[operation.scope][direction] += microseconds / steps / 1e6
    seconds = dict(sorted(seconds.items(), key=lambda item: -_total(item[1])))
    # Perfetto does not read the other entries.
    trace = {"displayTimeUnit": "ns", "traceEvents": trace["traceEvents"]}
    with gzip.open(file, "wt", encoding="utf-8") as opened:
        json.dump(trace, opened)
    (folder / SUMMARY).write_text(json.dumps({"steps": steps, "seconds": seconds}, indent=2))
    return seconds


def _total(by_scope: Mapping[str, Mapping[str, float]]) -> float:
    return sum(sum(by_pass.values()) for by_pass in by_scope.values())


def _own_time(events: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], float]]:
    """Each event with its duration less that of the events within it on the same thread."""
    events = sorted(events, key=lambda e: (e["pid"], e["tid"], e["ts"], -e["dur"]))
    for _, thread in itertools.groupby(events, key=lambda e: (e["pid"], e["tid"])):
        stack: list[list[Any]] = []
        for event in thread:
            while stack and stack[-1][0]["ts"] + stack[-1][0]["dur"] <= event["ts"]:
                yield tuple(stack.pop())
            if stack:
                stack[-1][1] -= event["dur"]
            stack.append([event, event["dur"]])
        while stack:
            yield tuple(stack.pop())
