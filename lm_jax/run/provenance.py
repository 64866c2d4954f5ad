"""Provenance of a run: code, packages, device, seeds and hashes, in a JSON file."""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import datetime
import importlib.metadata
import itertools
from pathlib import Path
import platform
import shlex
import subprocess
import sys
from typing import Any

from lm_jax.run.files import write_json
from lm_jax.run.results import Count, load_result

PROVENANCE_FILE = "provenance.json"
_PACKAGES = (
    "interpretable-attention-jax",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "ml-collections",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "numpy",
    "scipy",
    "pyarrow",
)


@dataclasses.dataclass(frozen=True)
class Commit:
    """The commit of the code, and whether files differed from it."""

    commit: str
    dirty: bool


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a run."""

    platform: str
    kind: str
    count: Count
    processes: Count


@dataclasses.dataclass(frozen=True)
class RunStart:
    """One start of a run: everything needed to repeat it.

    Attributes:
      start: time in UTC, ISO 8601.
      command: the command line as it was given, `iaj` without its folder or interpreter.
      git: None where the code is no tracked checkout.
      packages: version by name.
      python: version of Python.
      system: the operating system.
      device: None where JAX was not loaded.
      dtype: dtype of the computation.
      seeds: every random seed, by the name of what uses it.
      data: sha256 of every data file or set, and `ModelIdentity.text` of every model, by name.
      tokenizer: sha256 of the tokenizer file.
      fallbacks: why a slower implementation ran in place of a kernel, a sentence for each reason,
        in this process until the run ended.
    """

    start: str
    command: str
    git: Commit | None
    packages: dict[str, str]
    python: str
    system: str
    device: Devices | None
    dtype: str | None
    seeds: dict[str, int]
    data: dict[str, str]
    tokenizer: str | None
    fallbacks: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Provenance(RunStart):
    """`provenance.json`: the first start of a run and later ones."""

    restarts: tuple[RunStart, ...] = ()


def utc_now() -> str:
    """The time in UTC, in ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def collect_provenance(
    *,
    seeds: Mapping[str, int] | None = None,
    dtype: str | None = None,
    data: Mapping[str, str] | None = None,
    tokenizer: str | None = None,
) -> RunStart:
    """Returns the provenance of this run, as it starts.

    Args:
      seeds, dtype, data, tokenizer: fields of `RunStart` of the same names.
    """
    return RunStart(
        start=utc_now(),
        command=_command(),
        git=_git(Path(__file__).parent),
        packages=_versions(),
        python=platform.python_version(),
        system=platform.platform(terse=True),
        device=_device(),
        dtype=dtype,
        seeds=dict(seeds or {}),
        data=dict(data or {}),
        tokenizer=tokenizer,
    )


def record_provenance(folder: Path, entry: RunStart) -> None:
    """Writes `provenance.json`: the first start's entry, with later ones under `restarts`.

    Raises:
      CorruptError: the file is there and damaged.
    """
    path = folder / PROVENANCE_FILE
    if path.exists():
        first = load_result(path, Provenance)
        record = dataclasses.replace(first, restarts=(*first.restarts, entry))
    else:
        record = Provenance(**vars(entry))
    write_json(path, record)


def amend_provenance(folder: Path, **changed: Any) -> None:
    """Replaces fields of the latest start in `provenance.json`.

    Args:
      folder: work folder of the run.
      **changed: new values of fields of `RunStart`.

    Raises:
      CorruptError: the file is missing or damaged.
    """
    record = read_provenance(folder)
    if record.restarts:
        *earlier, last = record.restarts
        changed = {"restarts": (*earlier, dataclasses.replace(last, **changed))}
    write_json(folder / PROVENANCE_FILE, dataclasses.replace(record, **changed))


@contextlib.contextmanager
def recording_fallbacks(folder: Path) -> Iterator[None]:
    """Adds the kernels' fallbacks to the start that the context records in `provenance.json`.

    One that records none, as where a finished run is shown, changes nothing. Added are all of the
    process so far: a function that an earlier run of it traced keeps its kernels, and is not
    traced again.
    """
    before = _bytes_of(folder / PROVENANCE_FILE)
    try:
        yield
    finally:
        found = _fallbacks()
        if found and _bytes_of(folder / PROVENANCE_FILE) != before:
            amend_provenance(folder, fallbacks=found)


def _bytes_of(file: Path) -> bytes:
    return file.read_bytes() if file.is_file() else b""


def _fallbacks() -> tuple[str, ...]:
    # As with JAX, a command that never loaded the kernels has used none.
    dispatch = sys.modules.get("iaj_kernels.core.dispatch")
    return () if dispatch is None else dispatch.fallbacks()


def read_provenance(folder: Path) -> Provenance:
    """The provenance of the run in `folder`.

    Raises:
      CorruptError: `provenance.json` is missing or damaged.
    """
    return load_result(folder / PROVENANCE_FILE, Provenance)


def find_provenance(folder: Path) -> Provenance | None:
    """The provenance of the run that `folder` is part of: its own, or that of a folder above it.

    A run keeps its parts (seeds, models) at most three folders deep. None where there is none.

    Raises:
      CorruptError: the nearest `provenance.json` is damaged.
    """
    for place in (folder, *folder.parents[:3]):
        if (place / PROVENANCE_FILE).is_file():
            return read_provenance(place)
    return None


def _command() -> str:
    # `iaj` runs a module, and `sys.argv` has the module's arguments. Before the script are options
    # of the interpreter.
    given = sys.orig_argv[1:]
    match list(itertools.dropwhile(lambda word: word[:1] == "-" and word != "-m", given)):
        case ["-m", "iaj", *arguments]:
            words = ["iaj", *arguments]
        case [script, *arguments] if Path(script).stem == "iaj":
            words = ["iaj", *arguments]
        case _:
            words = ["python", *given] if given else sys.argv
    # A result is passed on with its provenance; the name of somebody's home is not part of it.
    home = str(Path.home())
    return shlex.join(argument.replace(home, "~") for argument in words)


def _git(source: Path) -> Commit | None:
    """Returns the commit of the code in `source` and whether it was changed; None if untracked."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(source), *arguments]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()

    try:
        # A package installed below somebody's checkout is no part of that checkout.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        dirty = bool(git("status", "--porcelain", "--untracked-files=no"))
        return Commit(git("rev-parse", "HEAD"), dirty)
    except (OSError, subprocess.CalledProcessError):
        return None


def _versions() -> dict[str, str]:
    installed = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def _device() -> Devices | None:
    # A command that never loaded JAX has used no device, and must not wake one to say so.
    jax = sys.modules.get("jax")
    if jax is None:
        return None
    devices = jax.devices()
    return Devices(
        platform=devices[0].platform,
        kind=devices[0].device_kind,
        count=len(devices),
        processes=jax.process_count(),
    )
