"""Shows what is installed here, what the devices are, and what is missing for which command.

    iaj doctor
    iaj doctor > doctor.txt        to go with a report of a fault

Nothing is fetched, trained or written. What is missing is no failure: the exit code is 0.
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
from lm_jax.run import user_cache
from lm_jax.run.compilation import machine

DISTRIBUTION = "interpretable-attention-jax"
PACKAGES = (DISTRIBUTION, "jax", "jaxlib", "flax")


@dataclasses.dataclass(frozen=True)
class Extra:
    """An optional extra of the distribution: what it brings, and the command that needs it."""

    modules: tuple[str, ...]
    used_by: str


EXTRAS = {
    "cuda12": Extra(("jax_cuda12_plugin", "jax_triton"), "every command, on NVIDIA GPUs (CUDA 12)"),
    "cuda13": Extra(("jax_cuda13_plugin", "jax_triton"), "every command, on NVIDIA GPUs (CUDA 13)"),
    "eval": Extra(("lm_eval",), "lm_jax.evaluate.harness"),
    "hpo": Extra(("optuna",), "iaj protot search --config.sampler=tpe (or random)"),
    "botorch": Extra(("botorch", "optuna", "optuna_integration"), "iaj protot search"),
}


def versions() -> Iterator[tuple[str, str]]:
    """Name and version of Python and of the packages that decide most."""
    yield "python", f"{platform.python_version()} ({sys.executable})"
    for name in PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, "not installed"
    # transformers probes for it, and imports our folder `kernels` in its place.
    other = {name.lower() for d in metadata.distributions() if (name := d.metadata["Name"])}
    if "kernels" in other:
        yield "kernels", "another package of the name of ours; pip uninstall kernels"


def devices() -> Iterator[tuple[str, str]]:
    """What JAX computes on, and the memory of each device and of the host."""
    import jax

    try:
        found = jax.devices()
    except RuntimeError as error:
        yield "devices", f"none: {' '.join(str(error).split())}"
        return
    for device in found:
        stats = {} if device.platform == "cpu" else device.memory_stats() or {}
        memory = f", {_size(stats['bytes_limit'])}" if "bytes_limit" in stats else ""
        yield f"device {device.id}", f"{device.platform}, {device.device_kind}{memory}"
    yield "host", f"{os.cpu_count()} CPU cores, {_size(host_memory())} of memory"


def host_memory() -> int:
    """Bytes of main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cache() -> Iterator[tuple[str, str]]:
    """The cache folder, the room there, and what is in it."""
    folder = user_cache.folder()
    there = next(each for each in (folder, *folder.parents) if each.is_dir())
    yield "cache", str(folder)
    yield "", f"{_size(shutil.disk_usage(there).free)} free on its disk"
    compiled = _total(folder / "compiled" / machine())
    yield "", f"{_size(compiled)} of compiled programs for this machine"
    held = {name: path for name in assets.entries() if (path := assets.cached(name))}
    for name, path in held.items():
        yield name, _size(_total(path))
    absent = [name for name in assets.entries() if name not in held]
    if absent:
        yield "not fetched", f"{', '.join(absent)}; iaj fetch NAME"


def missing(extra: Extra) -> list[str]:
    """The modules of an extra that are not installed."""
    return [name for name in extra.modules if util.find_spec(name) is None]


def extras() -> Iterator[tuple[str, str, str]]:
    """Name of each extra, what is missing of it, and what it is needed for."""
    for name, extra in EXTRAS.items():
        lacking = missing(extra)
        state = f"missing: {', '.join(lacking)}" if lacking else "installed"
        yield name, state, extra.used_by


def _total(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _size(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def run(arguments: argparse.Namespace) -> None:
    """Prints the tables."""
    del arguments
    console = Console(markup=False, soft_wrap=not sys.stdout.isatty())
    for title, rows in (("Versions", versions()), ("Devices", devices()), ("Cache", cache())):
        table = Table("name", "value", title=title, title_justify="left", show_header=False)
        table.columns[1].overflow = "fold"
        for row in rows:
            table.add_row(*row)
        console.print(table)
    table = Table("extra", "state", "needed for", title="Extras", title_justify="left")
    table.columns[2].overflow = "fold"
    for row in extras():
        table.add_row(*row)
    console.print(table)
    console.print(f"pip install '{DISTRIBUTION}[EXTRA]' installs what is missing of an extra.")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    return run_parsed(run, Parser("iaj doctor", __doc__), argv)


if __name__ == "__main__":
    sys.exit(main())
