"""Collective operations of a compiled program, counted in its text (HLO).

A collective in the body of a loop runs as often as the loop, so counts are those of one call of the
program. Bytes are of the whole array that a collective hands out or adds up, on one device; `sent`
is what a device sends where its group forms a ring (Patarasu and Yuan, 2009, "Bandwidth optimal
all-reduce algorithms"): with g devices the share (g - 1) / g of a gather or a scatter, twice that
of an all-reduce.

Read are the programs of XLA's CPU compiler, whose collectives are synchronous.
"""

from collections.abc import Iterator
import dataclasses
import math
import re

from lm_jax.errors import UsageError

OPS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf"= (.+?) ({'|'.join(OPS)})(-start)?\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_LOOP = re.compile(r" while\(.*\bbody=%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(r"\b(?:to_apply|calls|\w+_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_WIDTHS = {"pred": 1, "bf16": 2}


@dataclasses.dataclass(frozen=True)
class Collective:
    """All runs of one kind of collective in one call of a program.

    Attributes:
      op: the collective's name in HLO.
      devices: how many take part in each.
      runs: how often one runs.
      bytes: bytes of all runs together.
    """

    op: str
    devices: int
    runs: int
    bytes: int

    @property
    def sent(self) -> float:
        """Bytes that one device sends in all runs, in rings."""
        share = 1.0 if self.op == "collective-permute" else (self.devices - 1) / self.devices
        return (2.0 if self.op == "all-reduce" else 1.0) * share * self.bytes


def collectives(hlo: str) -> list[Collective]:
    """The collectives of a compiled program's text (`compiled.as_text()`), by name and group.

    Raises:
      UsageError: the program has asynchronous collectives, or a loop around a collective whose
        number of turns is not known.
    """
    computations, entry = _computations(hlo)
    partitions = re.search(r"num_partitions=(\d+)", hlo)
    everyone = int(partitions[1]) if partitions else 1
    totals: dict[tuple[str, int], tuple[int, int]] = {}

    def visit(name: str, turns: int | None) -> None:
        for line in computations.get(name, ()):
            found = _COLLECTIVE.search(line)
            if found:
                if turns is None:
                    raise UsageError(f"the loop {name} has a collective and no known trip count")
                if found[3]:
                    raise UsageError(
                        f"{found[2]}-start is asynchronous; compile the program for CPUs"
                    )
                devices = _group(found[4], everyone)
                size = _bytes(found[1]) * (devices if found[2] == "reduce-scatter" else 1)
                runs, total = totals.get((found[2], devices), (0, 0))
                totals[found[2], devices] = runs + turns, total + turns * size
            for callee, trips in _calls(line):
                visit(callee, None if turns is None or trips is None else turns * trips)

    visit(entry, 1)
    return [Collective(*key, *value) for key, value in sorted(totals.items())]


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """The lines of every computation, and the name of the first to run."""
    results: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in hlo.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            lines = results.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif line.startswith("  "):
            lines.append(line)
    return results, entry


def _calls(line: str) -> Iterator[tuple[str, int | None]]:
    """The computations that a line runs, each with how often; None if that is not known."""
    loop = _LOOP.search(line)
    if loop:
        trips = _TRIPS.search(line)
        yield loop[1], int(trips[1]) if trips else None
        return
    names = _CALLED.findall(line)
    for branches in _BRANCHES.findall(line):
        names += branches.replace("%", "").split(", ")
    yield from ((name, 1) for name in names)


def _bytes(shapes: str) -> int:
    """Bytes of an array, or of all arrays of a tuple, as in `(f32[2,3]{1,0}, s32[])`."""
    return sum(
        math.prod(map(int, filter(None, sizes.split(","))))
        * (_WIDTHS.get(dtype) or int(re.sub(r"\D", "", dtype)) // 8)
        for dtype, sizes in _ARRAY.findall(shapes)
    )


def _group(attributes: str, everyone: int) -> int:
    """The number of devices in a group, written in one of HLO's three ways."""
    # mesh['axis_0'=2,'axis_1'=4] {'axis_1'}; an axis may be a part, as 'axis_1':(1)2.
    mesh = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", attributes)
    if mesh:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part) if part else sizes[name] for name, part in axes)
    table = re.search(r"replica_groups=\[\d+,(\d+)\]", attributes)
    if table:
        return int(table[1])
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
    return len(listed[1].split(",")) if listed else everyone
