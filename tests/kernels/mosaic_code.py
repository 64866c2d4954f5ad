"""The machine code of a kernel of `iaj_kernels.attention.mosaic_pipeline`, compiled for an H200."""

from collections.abc import Callable
from pathlib import Path
import re
import subprocess
from typing import Any, NamedTuple

from tools.gpu_code import machine_code, target

# Queries and keys of a tile, and the threads of the warpgroup that it belongs to.
TILE, THREADS = (64, 128), 128
# Both products multiply 16 numbers of the axis that they sum over in one instruction.
DEPTH = 16


class Code(NamedTuple):
    """The spills that `ptxas` reports, and the instructions of a thread per element of a tile.

    The second is of the loop over tiles that are not masked.
    """

    spills: str
    instructions_per_element: float


def compiled(run: Callable[..., Any], *arguments: Any, H: int, folder: Path) -> Code:
    """The code of the one kernel of `run`, at heads of width H.

    Args:
      folder: where MOSAIC_GPU_DUMP_TO has Mosaic write the PTX, with MOSAIC_GPU_DUMP_PTX set.
    """
    target.compile_(run, *arguments, dump=folder / "xla")
    (ptx,) = folder.glob("*.ptx")
    (name,) = re.findall(r"\.entry (\w+)", ptx.read_text("utf-8"))
    cubin = str(folder / "kernel.cubin")
    ptxas = [target.program("ptxas"), "-v", f"-arch={target.ARCHITECTURE}", str(ptx), "-o", cubin]
    text = subprocess.run(ptxas, check=True, capture_output=True, text=True).stderr
    (spills,) = re.findall(r"\d+ bytes spill stores, \d+ bytes spill loads", text)

    nvdisasm = [target.program("nvdisasm"), "-c", cubin]
    listing = subprocess.run(nvdisasm, check=True, capture_output=True, text=True).stdout
    body = machine_code.instructions(listing, name)
    at = {label: i for i, each in enumerate(body) for label in each.labels}
    loops = [body[at[each.to] : i + 1] for i, each in enumerate(body) if at.get(each.to, i) < i]
    # A wait at a barrier branches backwards too, from past the end of the loop that it waits in; a
    # turn of the loop over tiles holds the products of one tile, and the shortest masks none.
    products = (H + TILE[1]) // DEPTH
    turns = [loop for loop in loops if sum(x.mnemonic == "HGMMA" for x in loop) == products]
    return Code(spills, min(map(len, turns)) * THREADS / (TILE[0] * TILE[1]))
