"""Static cost of the Triton kernels of a program, as jax-triton compiles them for the target.

jax-triton compiles a kernel to PTX while the program is lowered, with Triton's compiler and no GPU,
and writes what it compiled into the folder of JAX_TRITON_DUMP_DIR, a folder for each kernel.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
from pathlib import Path
import re
import tempfile

from iaj_kernels.core import triton_calls
from lm_jax.errors import BadInputError
from tools.gpu_code import machine_code

INSTALL = "pip install --no-deps --require-hashes -r requirements/triton.txt"
_SHARED = re.compile(r"shared_mem_bytes: (\d+)")
_THREADS = re.compile(r"\.reqntid (\d+)")


def require() -> None:
    """Checks that Triton's compiler can run here.

    Raises:
      BadInputError: it is not installed, or is interpreted; the message has the remedy.
    """
    if missing := [m for m in ("triton", "jax_triton") if importlib.util.find_spec(m) is None]:
        raise BadInputError(f"compiling for a GPU needs {' and '.join(missing)}: {INSTALL}")
    if os.environ.get(triton_calls.INTERPRET) == "1":
        raise BadInputError(f"compiling for a GPU needs Triton: unset {triton_calls.INTERPRET}")


def compilers() -> dict[str, str]:
    """Versions of the compilers, on which the figures depend."""
    return {name: importlib.metadata.version(name) for name in ("triton", "jax-triton")}


@contextlib.contextmanager
def compiled() -> Iterator[list[machine_code.Kernel]]:
    """The kernels that are lowered in its `with` block, listed at its end, sorted by name."""
    dump = Path(_dump().name)
    known = set(dump.iterdir())
    results: list[machine_code.Kernel] = []
    yield results
    found = [_kernel(folder) for folder in set(dump.iterdir()) - known]
    found.sort(key=lambda kernel: (kernel.name, kernel.registers, kernel.loop_instructions))
    for kernel in found:
        # The same kernel with other constants, numbered as XLA does.
        copies = sum(each.name.split("__")[0] == kernel.name for each in results)
        name = f"{kernel.name}__{copies}" if copies else kernel.name
        results.append(dataclasses.replace(kernel, name=name))


@functools.cache
def _dump() -> tempfile.TemporaryDirectory:
    """The folder of this process; jax-triton reads the variable when it is imported."""
    folder = tempfile.TemporaryDirectory()
    os.environ["JAX_TRITON_DUMP_DIR"] = folder.name
    return folder


def _kernel(folder: Path) -> machine_code.Kernel:
    (ptx,), (info,) = folder.glob("*.ptx"), folder.glob("*.compile_info")
    shared = _SHARED.search(info.read_text("utf-8"))
    threads = _THREADS.search(ptx.read_text("utf-8"))
    if shared is None or threads is None:
        raise LookupError(
            f"{folder}: jax-triton wrote no shared memory or no threads of {ptx.stem}"
        )
    return machine_code.kernel(ptx.stem, int(threads[1]), int(shared[1]), ptx)
