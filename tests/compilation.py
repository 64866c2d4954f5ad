"""For tests of many small programs that each run once: most of their time is compilation.

A folder whose tests are such imports `quickly_compiled` in its `conftest.py`.
"""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def quickly_compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leaves out LLVM's optimisation, but for tests marked `optimised` or `compiled`.

    The former hold what a CPU runs in earnest to the same bounds: the XLA path of the prefix mean,
    which training uses, and a bound that the rounding of unfused arithmetic passes.
    """
    marked = any(request.node.get_closest_marker(name) for name in ("optimised", "compiled"))
    jax.config.update("jax_disable_most_optimizations", not marked)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
