"""Shows installed versions, devices, the cache, and missing packages by the command they serve.

    iaj doctor
    iaj doctor > doctor.txt        to attach to a bug report

It fetches, trains and writes nothing. Missing packages are no failure: the exit code is 0.
"""

import argparse
from collections.abc import Iterator, Sequence
import dataclasses
from importlib import metadata, util
import os
from pathlib import Path
import platform
import shutil
import sys

from rich.console import Console
from rich.table import Table

from iaj.parser import Parser, run_parsed
from lm_jax import assets
from lm_jax.console.compilation import machine
from lm_jax.run import user_cache

DISTRIBUTION = "interpretable-attention-jax"
PACKAGES = (DISTRIBUTION, "jax", "jaxlib", "flax")


@dataclasses.dataclass(frozen=True)
class Extra:
    """An optional extra of the distribution: its modules, and the command that needs it."""

    modules: tuple[str, ...]
    used_by: str


EXTRAS = {
    "cuda12": Extra(
        ("jax_cuda12_plugin", "jax_triton", "triton"), "every command, on NVIDIA GPUs (CUDA 12)"
    ),
    "cuda13": Extra(
        ("jax_cuda13_plugin", "jax_triton", "triton"), "every command, on NVIDIA GPUs (CUDA 13)"
    ),
    "eval": Extra(("lm_eval",), "lm_jax.evaluate.harness"),
    "hpo": Extra(("optuna",), "iaj protot search --config.sampler=tpe (or random)"),
    "wandb": Extra(("wandb",), "training commands with --track=wandb"),
    "trackio": Extra(("trackio",), "training commands with --track=trackio"),
    "botorch": Extra(("botorch", "optuna", "optuna_integration"), "iaj protot search"),
}


def versions() -> Iterator[tuple[str, str]]:
    """Name and version of Python and of the most important packages."""
    yield "python", f"{platform.python_version()} ({sys.executable})"
    for name in PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, "not installed"


def devices() -> Iterator[tuple[str, str]]:
    """Devices of JAX with their memory, and cores and memory of the host."""
    import jax

    try:
        available = jax.devices()
    except RuntimeError as error:
        yield "devices", f"none: {' '.join(str(error).split())}"
        return
    for device in available:
        stats = {} if device.platform == "cpu" else device.memory_stats() or {}
        memory = f", {_size(stats['bytes_limit'])}" if "bytes_limit" in stats else ""
        yield f"device {device.id}", f"{device.platform}, {device.device_kind}{memory}"
    yield "host", f"{os.cpu_count()} CPU cores, {_size(host_memory())} of memory"


def host_memory() -> int:
    """Bytes of main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cache() -> Iterator[tuple[str, str]]:
    """The cache folder, free space on its disk, and its contents."""
    folder = user_cache.folder()
    existing = next(each for each in (folder, *folder.parents) if each.is_dir())
    yield "cache", str(folder)
    yield "", f"{_size(shutil.disk_usage(existing).free)} free on its disk"
    compiled = _total(folder / "compiled" / machine())
    yield "", f"{_size(compiled)} of compiled programs for this machine"
    fetched = {name: path for name in assets.entries() if (path := assets.cached(name))}
    for name, path in fetched.items():
        yield name, _size(_total(path))
    absent = [name for name in assets.entries() if name not in fetched]
    if absent:
        yield "not fetched", f"{', '.join(absent)}; iaj fetch NAME"


def missing(extra: Extra) -> list[str]:
    """Modules of an extra that are not installed."""
    return [name for name in extra.modules if util.find_spec(name) is None]


def extras() -> Iterator[tuple[str, str, str]]:
    """Name of each extra, its missing modules, and what it is needed for."""
    for name, extra in EXTRAS.items():
        modules = missing(extra)
        state = f"missing: {', '.join(modules)}" if modules else "installed"
        yield name, state, extra.used_by


def _total(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _size(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def run(arguments: argparse.Namespace) -> None:
    """Prints the tables."""
    del arguments
    terminal = Console(markup=False, soft_wrap=not sys.stdout.isatty())
    for title, rows in (("Versions", versions()), ("Devices", devices()), ("Cache", cache())):
        table = Table("name", "value", title=title, title_justify="left", show_header=False)
        table.columns[1].overflow = "fold"
        for row in rows:
            table.add_row(*row)
        terminal.print(table)
    table = Table("extra", "state", "needed for", title="Extras", title_justify="left")
    table.columns[2].overflow = "fold"
    for row in extras():
        table.add_row(*row)
    terminal.print(table)
    terminal.print(
        f"pip install '{DISTRIBUTION}[EXTRA]' installs the missing packages of an extra."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    return run_parsed(run, Parser("iaj doctor", __doc__), argv)


if __name__ == "__main__":
    sys.exit(main())
