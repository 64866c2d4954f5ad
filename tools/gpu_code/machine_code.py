"""Static cost of a compiled kernel: registers, spills, shared memory, instructions of its loop.

1. XLA's dump names the Triton kernels of a program (the custom calls of its HLO), and for each its
   threads and shared memory (the thunk sequence).
2. `ptxas -v` compiles a kernel's PTX and reports registers and spilled bytes.
3. `nvdisasm` lists the instructions. A backward branch closes a loop; the main loop is the longest
   of those that contain tensor-core instructions and no other such loop.

The name of a kernel ends in the tile of one turn of its main loop: `gated_attention_fwd_m64_n64`
for 64 queries by 64 keys. A thread does M N / (32 warps) of its elements; the instructions of the
loop over that number are the cost of an element, whatever the tiles, and bound the speed of a
kernel that is limited by the issue of instructions.
"""

import dataclasses
from pathlib import Path
import re
import subprocess
import tempfile
from typing import NamedTuple

from tools.gpu_code import target

_TILE = re.compile(r"_m(\d+)_n(\d+)(?=_|$)")
_CUSTOM_CALL = re.compile(r'custom_call_target="__gpu\$xla\.gpu\.triton".*?\bname = "([^"]+)"')
_LAUNCH = re.compile(
    r"\] +(?P<name>\S+) grid: \[.*?\] threads: \[(?P<threads>\d+), 1, 1\] +"
    r"shared_memory: (?P<shared>\d+) bytes"
)
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_LABEL = re.compile(r"(\.L_\w+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_BRANCH = re.compile(r"`\((\.L_\w+)\)")
# Of a warpgroup (Hopper's wgmma) and of a warp; the first is the faster.
_TENSOR_CORES = ("HGMMA", "HMMA")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The figures of one compiled kernel; `name` is without the tile.

    Attributes:
      tile: elements of one turn of the main loop, (M, N), if the name contains it.
      spill_bytes: bytes that one thread spills: stores and loads together.
      tensor_cores: `HGMMA`, `HMMA` or `none`: the best that the kernel uses.
      loop_instructions: instructions of one turn of the main loop in one thread; of the whole
        kernel if it has no loop.
    """

    name: str
    tile: tuple[int, int] | None
    warps: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_cores: str
    loop_instructions: int

    @property
    def instructions_per_element(self) -> float | None:
        """Instructions of a thread for one element of the tile; None without a tile."""
        if self.tile is None:
            return None
        return self.loop_instructions * 32 * self.warps / (self.tile[0] * self.tile[1])


def kernels(dump: Path) -> list[Kernel]:
    """The Pallas kernels in XLA's dump of one program, sorted by name.

    Raises:
      LookupError: a kernel of the program has no launch or no PTX in the dump.
    """
    hlo = _only(dump, "*after_optimizations.txt")
    called = {name for line in hlo.splitlines() for name in _CUSTOM_CALL.findall(line)}
    launches = {m["name"]: m for m in _LAUNCH.finditer(_only(dump, "*thunk_sequence.txt"))}
    ptx = {}
    for path in dump.glob("*.ptx"):
        for name in re.findall(r"\.visible \.entry (\w+)", path.read_text("utf-8")):
            ptx[name] = path
    results = []
    for name, launch in launches.items():
        # XLA distinguishes two programs of the same name by a number.
        if re.sub(r"__\d+$", "", name) in called:
            results.append(kernel(name, int(launch["threads"]), int(launch["shared"]), ptx[name]))
    if missing := called - {re.sub(r"__\d+$", "", name) for name in launches}:
        raise LookupError(f"{dump}: no launch of {', '.join(sorted(missing))}")
    return sorted(results, key=lambda each: each.name)


def kernel(name: str, threads: int, shared: int, ptx: Path) -> Kernel:
    """The figures of the entry `name` of a PTX file, with the threads and shared bytes of a block.

    Raises:
      LookupError: ptxas reports no figures of it.
    """
    with tempfile.TemporaryDirectory() as folder:
        cubin = str(Path(folder) / "kernel.cubin")
        command = [target.program("ptxas"), "-v", f"-arch={target.ARCHITECTURE}", str(ptx)]
        text = _run([*command, "-o", cubin]).stderr
        listing = _run([target.program("nvdisasm"), "-c", cubin]).stdout
    # The figures of a kernel follow its name; those of another entry may come before.
    own = text.split(f"Function properties for {name}\n", 1)[1]
    spills, registers = _SPILLS.search(own), _REGISTERS.search(own)
    if spills is None or registers is None:
        raise LookupError(f"ptxas reports no spills or registers of {name}: {text}")
    body = instructions(listing, name)
    used = {each.mnemonic for each in body}
    tile = _TILE.search(name)
    return Kernel(
        name=_TILE.sub("", name),
        tile=(int(tile[1]), int(tile[2])) if tile else None,
        warps=threads // 32,
        registers=int(registers[1]),
        spill_bytes=int(spills[1]) + int(spills[2]),
        shared_bytes=shared,
        tensor_cores=next((each for each in _TENSOR_CORES if each in used), "none"),
        loop_instructions=len(main_loop(body)),
    )


class Instruction(NamedTuple):
    """Labels before an instruction, its mnemonic without modifiers, a branch's target or ""."""

    labels: tuple[str, ...]
    mnemonic: str
    to: str


def instructions(listing: str, name: str) -> list[Instruction]:
    """The instructions of the function `name` in the output of `nvdisasm -c`, without padding."""
    results: list[Instruction] = []
    inside, labels = False, ()
    for line in listing.splitlines():
        if line.startswith(".text."):
            inside, labels = line == f".text.{name}:", ()
        elif inside and (label := _LABEL.match(line)):
            labels += (label[1],)
        elif inside and (m := _INSTRUCTION.match(line)):
            mnemonic = m[1].split(".")[0]
            to = _BRANCH.search(m[2]) if mnemonic == "BRA" else None
            if mnemonic != "NOP":
                results.append(Instruction(labels, mnemonic, to[1] if to else ""))
                labels = ()
    return results


def main_loop(body: list[Instruction]) -> list[Instruction]:
    """The instructions of one turn of the main loop; all of them if there is no loop."""
    at = {label: i for i, each in enumerate(body) for label in each.labels}
    # Of several branches to one label the last closes the loop, and the others begin the next turn.
    ends = {at[each.to]: i + 1 for i, each in enumerate(body) if at.get(each.to, i) < i}
    loops = [(first, body[first:last]) for first, last in ends.items()]
    computing = [loop for loop in loops if _has_tensor_cores(loop[1])] or loops
    innermost = [
        inner
        for first, inner in computing
        if not any(first < other < first + len(inner) for other, _ in computing)
    ]
    return max(innermost, key=len, default=body)


def _has_tensor_cores(body: list[Instruction]) -> bool:
    return any(each.mnemonic in _TENSOR_CORES for each in body)


def _only(dump: Path, pattern: str) -> str:
    (path,) = dump.glob(pattern)
    return path.read_text("utf-8")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {run.returncode}: {run.stderr}")
    return run
