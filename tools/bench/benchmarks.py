"""Benchmarks of the kernels: workload, baseline and bar of each row of `docs/kernels/gpu.md`.

A benchmark first compares our implementation with the reference, and reports no speed if they
disagree. If its baseline is not installed it is not run, and neither reaches nor misses its bar.
`speed` is the baseline's time over ours, at least the bar; `time` is our time over the baseline's,
`microseconds` our time, and `memory` our temporaries over the baseline's, each at most the bar.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import math
import statistics

import jax

from iaj_kernels.core import cases, dispatch, triton_calls
from iaj_kernels.suites import SUITES
from tools.bench import baselines, timing

# Deviations by operation, implementation and case.
Checked = Mapping[tuple[str, str | None, str], Sequence[cases.Deviation]]
# Calls in one run of baselines that take milliseconds and gigabytes.
_CALLS = {"reference": 1, "dense_xla": 5, "xla": 5}


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One row; `what` is "forward", "gradient" (forward and backward), or "backward": the
    gradient's time minus the forward's, turn by turn."""

    op: str
    case: str
    what: str
    baseline: str
    implementation: str | None = None
    speed: float | None = None
    time: float | None = None
    microseconds: float | None = None
    memory: float | None = None

    @property
    def label(self) -> str:
        """The row's name."""
        by = " by Mosaic" if self.implementation == "mosaic" else ""
        return f"{self.op} {self.what}{by}, {self.case}, against {self.baseline}"


@dataclasses.dataclass(frozen=True)
class Result:
    """Measurements of a benchmark; only `deviations` if the comparison failed.

    `missing` names what to install for it or its baseline, and `failed` is the error with which one
    of them does not run; nothing is measured then.
    """

    benchmark: Benchmark
    deviations: list[cases.Deviation] = dataclasses.field(default_factory=list)
    missing: str = ""
    failed: str = ""
    speed: timing.Ratio | None = None
    time: timing.Ratio | None = None
    ours_seconds: list[float] = dataclasses.field(default_factory=list)
    baseline_seconds: list[float] = dataclasses.field(default_factory=list)
    ours_bytes: int = 0
    baseline_bytes: int = 0

    @property
    def green(self) -> bool:
        """Whether the values and gradients agreed with the reference."""
        return all(each.ok for each in self.deviations)

    @property
    def memory(self) -> float:
        """Our temporaries over the baseline's; 0 where neither has any."""
        if not self.baseline_bytes:
            return math.inf if self.ours_bytes else 0.0
        return self.ours_bytes / self.baseline_bytes

    def reached(self) -> dict[str, bool]:
        """Whether each bar of the benchmark was reached."""
        benchmark, result = self.benchmark, {}
        if self.missing:
            return result
        if self.failed:
            return {"runs": False}
        if not self.green or self.speed is None or self.time is None:
            return {"comparison": False}
        if benchmark.speed is not None:
            result["speed"] = self.speed.median >= benchmark.speed
        if benchmark.time is not None:
            result["time"] = self.time.median <= benchmark.time
        if benchmark.microseconds is not None:
            result["microseconds"] = (
                1e6 * statistics.median(self.ours_seconds) <= benchmark.microseconds
            )
        if benchmark.memory is not None:
            result["memory"] = self.memory <= benchmark.memory
        return result


def shorten(case: cases.Case, longest: int) -> cases.Case:
    """The case with sequences of at most `longest`, for the comparison with the reference.

    The reference stores a state for every step, or a whole score matrix.
    """
    sizes = dict(case.sizes)
    for letter in ("T", "S"):
        if letter in sizes:
            sizes[letter] = min(sizes[letter], longest)
    if sizes != dict(case.sizes):
        sizes["B"] = min(sizes["B"], 2)
    return dataclasses.replace(case, sizes=sizes)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A benchmark that is compared and compiled, and can be timed.

    Attributes:
      result: the result without times; final where there are no programs.
      programs: our program and the baseline's, for each pass.
    """

    result: Result
    programs: Sequence[timing.Program] = ()

    def measured(self, repeats: int, settle: float = 0.0) -> Result:
        """Times both in turns.

        Args:
          repeats: number of turns.
          settle: untimed seconds before each timed run (`timing.in_turns`).
        """
        if not self.programs:
            return self.result
        runs = [program.run for program in self.programs]
        try:
            seconds = timing.in_turns(runs, repeats, settle=settle)
        except jax.errors.JaxRuntimeError as error:
            return dataclasses.replace(self.result, failed=timing.first_line(error))
        seconds = [
            [each / program.calls for each in series]
            for program, series in zip(self.programs, seconds, strict=True)
        ]
        if self.result.benchmark.what == "backward":
            seconds = [
                [max(g - f, 1e-9) for g, f in zip(seconds[i], seconds[i + 2], strict=True)]
                for i in range(2)
            ]
        ours, baseline = self.programs[:2]
        return dataclasses.replace(
            self.result,
            speed=timing.ratio(seconds[1], seconds[0]),
            time=timing.ratio(seconds[0], seconds[1]),
            ours_seconds=seconds[0],
            baseline_seconds=seconds[1],
            ours_bytes=ours.bytes,
            baseline_bytes=baseline.bytes,
        )


def prepare(
    benchmark: Benchmark, copies: int = 1, longest: int = 512, checked: Checked | None = None
) -> Prepared:
    """Compares with the reference and compiles; it may run in several threads at once.

    Args:
      copies: calls in one program of ours (`timing.program`); times are per call. The baselines in
        `_CALLS` are called less often.
      longest: longest sequence of the comparison.
      checked: comparisons that this device has passed already, which are not made again.
    """
    outside = baselines.OUTSIDE.get(benchmark.baseline)
    if outside is not None and (missing := outside.missing()):
        return Prepared(Result(benchmark, missing=missing))
    if benchmark.implementation == "triton":
        reason = triton_calls.unsupported_reason(dispatch.target())
        if reason:
            return Prepared(Result(benchmark, missing=reason))
    suite = SUITES[benchmark.op]
    case = suite.named(benchmark.case)
    deviations = (checked or {}).get((benchmark.op, benchmark.implementation, case.name))
    if deviations is None:
        try:
            deviations = cases.compare(suite, shorten(case, longest), benchmark.implementation)
        except dispatch.UnavailableError as error:
            return Prepared(Result(benchmark, missing=timing.first_line(error)))
        except jax.errors.JaxRuntimeError as error:
            return Prepared(Result(benchmark, failed=timing.first_line(error)))
    result = Result(benchmark, list(deviations))
    if not result.green:
        return Prepared(result)
    arrays = suite.make(case, jax.random.key(0))
    passes = ("gradient", "forward") if benchmark.what == "backward" else (benchmark.what,)
    try:
        built = [
            each for what in passes for each in _pair(what, benchmark, suite, case, arrays, copies)
        ]
    except jax.errors.JaxRuntimeError as error:
        return Prepared(dataclasses.replace(result, failed=timing.first_line(error)))
    return Prepared(result, built)


def _pair(
    what: str,
    benchmark: Benchmark,
    suite: cases.Suite,
    case: cases.Case,
    arrays: cases.Arrays,
    copies: int,
) -> Iterator[timing.Program]:
    """Our program of one pass, then the baseline's."""
    outside = baselines.OUTSIDE.get(benchmark.baseline)
    both = [(baselines.ours(benchmark.op, benchmark.implementation), arrays, copies, True)]
    if outside is None:
        inputs = baselines.INPUTS.get(benchmark.baseline, lambda arrays: arrays)
        program = baselines.BASELINES[benchmark.baseline](benchmark.op)
        calls = min(copies, _CALLS.get(benchmark.baseline, copies))
        both.append((program, inputs(arrays), calls, benchmark.baseline not in _CALLS))
    for each, read, calls, together in both:
        if what == "forward":
            timed = baselines.forward(each, case, read)
        else:
            timed = baselines.gradient(each, suite, case, read)
        yield timing.program(*timed, copies=calls, together=together)
    if outside is not None:
        yield outside.program(what, suite, case, arrays, copies)


def cpu() -> Iterator[Benchmark]:
    """The rows for a CPU: the materialised form stores a state for every step."""
    for case in ("b8_t256_r32_e128_float32", "b1_t4096_r32_e128_float32"):
        baseline, implementation = "materialised", "xla"
        yield Benchmark(
            "prefix_mean", case, "forward", baseline, implementation, speed=25, memory=0.1
        )
        yield Benchmark(
            "prefix_mean", case, "gradient", baseline, implementation, speed=18, memory=0.1
        )


# Forward and backward bars by the floors of docs/kernels/without_gpu.md, in microseconds, H200.
_FLOORS = {
    "b32_t256_r32_e128_bfloat16": (10, 20),
    "b32_t512_r32_e256_bfloat16": (18, 40),
    "b1_t32768_r32_e256_bfloat16": (35, 75),
    "b1_t131072_r32_e256_bfloat16": (130, 260),
}

# Speed over chunked gated linear attention, which processes a sequence sequentially.
_AGAINST_FLA = {
    "b32_t256_r32_e128_bfloat16": 1.5,
    "b32_t512_r32_e256_bfloat16": 1.5,
    "b1_t32768_r32_e256_bfloat16": 5.0,
    "b1_t131072_r32_e256_bfloat16": 5.0,
}


def gpu() -> Iterator[Benchmark]:
    """The rows for an NVIDIA GPU; microseconds are for an H200."""
    for case, (forward, backward) in _FLOORS.items():
        for what, bar in (("forward", forward), ("backward", backward)):
            yield Benchmark("prefix_mean", case, what, "xla", "pallas", microseconds=bar)
    # As many tokens through attention of the same width, 512: E is half of the model's.
    for T, bar in ((2048, 5), (8192, 18), (32_768, 70)):
        case = f"b{32_768 // T}_t{T}_r32_e256_bfloat16"
        yield Benchmark("prefix_mean", case, "forward", "cudnn_width_512", "pallas", speed=bar)
    for case, bar in _AGAINST_FLA.items():
        yield Benchmark("prefix_mean", case, "gradient", "fla", "pallas", speed=bar)
    yield from _gated()
    for case in _timed("row_map_attention"):
        if case.name.endswith("_relu4_bfloat16"):
            for implementation in ("pallas", "mosaic"):
                yield Benchmark(
                    "row_map_attention", case.name, "forward", "cudnn", implementation, time=1.5
                )
    for case in _timed("score_stats"):
        if case.sizes["T"] == 8192 and "biases" not in case.options:
            yield Benchmark("score_stats", case.name, "forward", "cudnn", "pallas", time=2.0)
    # The kernels of the baselines are chosen before XLA, and must be faster; and within one and a
    # half times the library's own.
    for op, library in (("selective_scan", "mamba_ssm"), ("delta_rule", "fla")):
        for case in _timed(op):
            for what in ("forward", "gradient"):
                yield Benchmark(op, case.name, what, "xla", "triton", speed=1.0)
                yield Benchmark(op, case.name, what, library, "triton", time=1.5)


def _gated() -> Iterator[Benchmark]:
    op, ours = "gated_attention", "pallas"
    for case in _timed(op):
        if case.options.get("mode") == "threshold":
            yield Benchmark(op, case.name, "forward", "cudnn", ours, time=1.0)
            continue
        bar = {64: 2.0, 128: 1.7}[case.sizes["H"]]
        for implementation in (ours, "mosaic"):
            yield Benchmark(op, case.name, "forward", "cudnn", implementation, time=bar)
        yield Benchmark(op, case.name, "backward", "cudnn", ours, time=2.7)
        if case.sizes["T"] == 2048:
            yield Benchmark(op, case.name, "gradient", "reference", ours, speed=5, memory=0.01)
    # The paper's Fig. 10: about 7.5 times the naive form at T = 2048.
    published = "b10_t2048_s2048_n10_k10_h10_float32"
    yield Benchmark(op, published, "forward", "reference", ours, speed=7.5)


def _timed(op: str) -> list[cases.Case]:
    """The bfloat16 workloads of an operation that are timed on a GPU."""
    return [case for case in SUITES[op].using("gpu") if case.dtype == "bfloat16"]


def for_device(device: str) -> list[Benchmark]:
    """The rows of a device, "cpu" or "gpu"."""
    return list({"cpu": cpu, "gpu": gpu}[device]())
