"""What is static in one call of `prefix_mean`: fixed when it is traced, hashable."""

import dataclasses

from kernels.core import dispatch


@dataclasses.dataclass(frozen=True)
class Config:
    """Passed to every implementation; `target` is what the call, and its backward, runs on."""

    mass_normalisation: bool
    log_write: bool
    target: dispatch.Target
