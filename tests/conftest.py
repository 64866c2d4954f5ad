"""What every test runs under: four CPU devices, no network, strict shapes, and the reasons to skip.

Set in the environment and before jax is imported, so that the commands a test starts inherit it.
"""

from collections.abc import Generator
import gc
import importlib.metadata
import importlib.util
import os
import pathlib
import resource
import sys
import threading
import tomllib
from typing import Any

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could set its flags")

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["HF_HUB_OFFLINE"] = "1"
# Triton decides on import whether its kernels are interpreted.
os.environ["TRITON_INTERPRET"] = "1"
# What a test compiles is neither taken from the user's cache nor put there (`compiled_once`).
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
# It would win over the flag below.
os.environ.pop("JAX_NUM_CPU_DEVICES", None)
# Small programs, and a worker for each core: splitting one for several threads only costs time.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_cpu_parallel_codegen_split_count=1"
)
# Half of the time that is no compiling is lowering, which notes the source of every operation.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
# Most tests are many small programs that run once each, and compiling is most of their time: it
# takes a fraction of it without LLVM's optimisation, which `optimised_where_marked` lifts, and half
# without XLA's emitters of fused loops.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(os.environ.get("COMPILE_AS_USERS") != "1"))
# From jax 0.11 on XLA has nothing but the emitters, and a process ends at a flag that is unknown.
if importlib.metadata.version("jax")[:5] == "0.10." and (
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1"
):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
if "xla_force_host_platform_device_count" not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=4"

from absl import flags
import hypothesis
import pytest

# grain reads an absl flag, and no test runs under absl's `app.run`.
flags.FLAGS.mark_as_parsed()

# The same examples in every run: a failure is repeated by running the test again. No deadline, for
# the first example of a shape compiles.
hypothesis.settings.register_profile(
    "suite", derandomize=True, deadline=None, max_examples=40, database=None
)
hypothesis.settings.load_profile("suite")


# Whether the test before this one was compiled in earnest.
_IN_EARNEST = False


@pytest.fixture(autouse=True)
def optimised_where_marked(request: pytest.FixtureRequest) -> Generator[None]:
    """Compiles in earnest what is marked `optimised`, `compiled` or `torch`.

    The first hold what a CPU runs in earnest to the same bounds: the XLA path of the prefix mean,
    which training uses, and a bound that the rounding of unfused arithmetic passes. They use no
    program that a test before them compiled quickly.
    """
    global _IN_EARNEST
    before, _IN_EARNEST = _IN_EARNEST, False
    if not any(map(request.node.get_closest_marker, ("optimised", "compiled", "torch"))):
        yield
        return
    import jax

    _IN_EARNEST = True
    if not before:
        jax.clear_caches()
    quickly = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", quickly)


@pytest.fixture(autouse=True, scope="session")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps compiled programs in a folder of this process alone, as equal ones are made often.

    A command that is run again, to be resumed or refused, compiles what it compiled before.
    Processes that a test starts have no cache: two at once could read an entry half written.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


# Programs that are lowered in one MLIR context. Its constants are freed with it.
_LOWERED_IN_ONE_CONTEXT = 100


@pytest.fixture(autouse=True, scope="session")
def contexts_are_shared() -> Generator[None]:
    """Lowers many programs in one MLIR context.

    jax makes a context for each program, which takes milliseconds and a megabyte, as much as the
    lowering of a small program itself; the programs are the same. Each thread has its own, and what
    is compiled while another program is lowered gets a new one: it would be written into the other.
    """
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    make = getattr(mlir, "make_ir_context", None)
    if make is None:
        yield
        return
    kept = threading.local()

    def make_or_keep() -> object:
        if ir.Context.current is not None:
            return make()
        if getattr(kept, "left", 0) == 0:
            kept.context, kept.left = make(), _LOWERED_IN_ONE_CONTEXT
        kept.left -= 1
        return kept.context

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlir, "make_ir_context", make_or_keep)
        yield


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_are_forgotten() -> Generator[None]:
    """Forgets what was compiled, after a file's tests, in a process that has grown large.

    Files share the programs of single operations, and little else.
    """
    yield
    if "jax" in sys.modules and _is_large():
        import jax

        jax.clear_caches()


def _is_large() -> bool:
    """Whether the process holds over two gigabytes, or cannot tell."""
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text("ascii").split()[1])
    except OSError:
        return True
    return pages * resource.getpagesize() > 2**31


# The tests that each study passes take too long for one worker.
_STUDIES = "tests/test_studies.py"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives each worker whole files, as `--dist loadfile` does, and of the studies one by one."""
    from xdist.scheduler import LoadFileScheduling

    class ByFileAndStudy(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            test, _, study = nodeid.partition("[")
            file = test.partition("::")[0]
            return f"{file}[{study}" if study and file == _STUDIES else file

    return ByFileAndStudy(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Collects garbage less often, and never looks at what was imported.

    Tracing makes many objects that refer to each other, and Python would go through all of them,
    the modules of jax too, again and again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 50)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips a test whose torch, Triton, GPU compiler or assets are not here, and says so.

    Files that take long come first, so that no worker begins one when the others are through.
    """
    long = [*_reasons()]
    items.sort(key=lambda item: [*long, _file(item.nodeid)].index(_file(item.nodeid)))
    has_torch = importlib.util.find_spec("torch") is not None
    for item in items:
        if item.get_closest_marker("nightly") and not item.get_closest_marker("slow"):
            raise pytest.UsageError(f"{item.nodeid}: a test marked nightly is marked slow as well")
        if item.get_closest_marker("torch") and not has_torch:
            item.add_marker(
                pytest.mark.skip(reason="needs torch: pip install -r requirements/torch.txt")
            )
        if item.get_closest_marker("triton") and importlib.util.find_spec("triton") is None:
            item.add_marker(
                pytest.mark.skip(reason="needs triton: pip install -r requirements/triton.txt")
            )
        if item.get_closest_marker("compiled") and (reason := _compiler_unsupported()):
            item.add_marker(pytest.mark.skip(reason=reason))
        real = item.get_closest_marker("real")
        missing = _not_cached(real.args) if real else []
        if missing:
            names = " ".join(missing)
            item.add_marker(pytest.mark.skip(reason=f"needs assets: python -m tools.fetch {names}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escapes captured text that is not Unicode: pytest-xdist stops the run when it meets some."""
    report = yield
    report.sections = [
        (title, text.encode(errors="backslashreplace").decode()) for title, text in report.sections
    ]
    return report


# A file whose tests take longer, in seconds, needs a reason.
_LONG = 30.0
# Seconds of the tests of each file, in the process that reports.
_SECONDS: dict[str, float] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds up what the tests of a file take, with their fixtures."""
    file = _file(report.nodeid)
    _SECONDS[file] = _SECONDS.get(file, 0.0) + report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the ten files that took longest, each with the reason that tests/slow_files.toml has.

    A contributor sees there what is to be made faster; no test fails by its time.
    """
    if len(_SECONDS) <= 10:
        return
    reasons = _reasons()
    terminalreporter.section("slowest files")
    for name in sorted(_SECONDS, key=lambda name: -_SECONDS[name])[:10]:
        told = reasons.get(name, "no reason" if _SECONDS[name] > _LONG else "")
        terminalreporter.write_line(f"{_SECONDS[name]:6.1f} s  {name}  {told}".rstrip())


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _reasons() -> dict[str, str]:
    """Files that take long, and why, the longest first."""
    with (pathlib.Path(__file__).parent / "slow_files.toml").open("rb") as file:
        return tomllib.load(file)


def _compiler_unsupported() -> str:
    from tools.gpu_code import target

    return target.unsupported_reason()


def _not_cached(names: tuple[str, ...]) -> list[str]:
    if not names:
        raise pytest.UsageError("name the assets of a test: @pytest.mark.real('smollm2')")
    from lm_jax import assets

    return [name for name in names if assets.cached(name) is None]
