"""Typed results of the two-hop study; JSON files are read back strictly."""

import dataclasses

import pyarrow as pa


@dataclasses.dataclass(frozen=True)
class Paths:
    """Shares of what is written to results, and how well and how sparsely all is reconstructed.

    Attributes:
      merged: share that features of the first MLP write.
      from_bits, two_hops: shares that features of the second MLP write, by what they read
        (`measures`). The three are 0 where nothing is written, and else sum to 1.
      l0: active features per input, over both layers.
      unexplained: share of the variance of both outputs together that is not explained.
      unexplained_result: the same, of the second MLP's output.
    """

    merged: float
    from_bits: float
    two_hops: float
    l0: float
    unexplained: float
    unexplained_result: float


@dataclasses.dataclass(frozen=True)
class TwoHopRun:
    """One transcoder: its settings and what was measured."""

    second_hop: str
    window: int
    sparsity: float
    seed: int
    paths: Paths


@dataclasses.dataclass(frozen=True)
class TwoHopSummary:
    """`summary.json`."""

    runs: tuple[TwoHopRun, ...]
    device: str


ROWS = pa.schema(
    [
        ("second_hop", pa.string()),
        ("window", pa.int32()),
        ("sparsity", pa.float64()),
        ("seed", pa.int64()),
        *((field.name, pa.float64()) for field in dataclasses.fields(Paths)),
    ]
)
