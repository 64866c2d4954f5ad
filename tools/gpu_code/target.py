"""Lowers and compiles for an NVIDIA H200 on a machine without a GPU.

1. `lower` stops at Triton's dialect inside StableHLO. It needs only jaxlib, of any version.
2. `compile_` continues to machine code: the PJRT plugin contains XLA:GPU, LLVM and Triton, and
   takes the device from a description instead of a driver. It writes its output into a folder.

Both trace the operations for that GPU, so that `implementation=None` selects what would run there.
"""

from collections.abc import Callable
import importlib.metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

from iaj_kernels.core import dispatch
from lm_jax.errors import BadInputError

TARGET = dispatch.Target("gpu", "NVIDIA H200")
ARCHITECTURE = "sm_90a"
INSTALL = "pip install --no-deps --require-hashes -r requirements/aot.txt"
# A later jax dumps no PTX, and hides the machine code inside its serialised executable.
READS_PTX_OF = (0, 10)
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
_PROGRAMS = {"ptxas": "nvidia-cuda-nvcc", "nvdisasm": "nvidia-cuda-nvdisasm"}

_MULTIPROCESSORS = 132
# A `GpuTargetConfigProto`, with the figures of xla/backends/gpu/target_config/specs/h200.txtpb.
_DEVICE = f"""
gpu_device_info {{
  cuda_compute_capability {{ major: 9 }}
  core_count: {_MULTIPROCESSORS}
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_memory_size: 151397597184
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{TARGET.device_kind}"
"""


class NotCompiledError(Exception):
    """A function that does not compile for the target; the message is one sentence."""


def unsupported_reason() -> str:
    """What is missing here to compile and to read the result, with the remedy, or ""."""
    if jax.__version_info__[:2] != READS_PTX_OF:
        text = ".".join(map(str, READS_PTX_OF))
        return (
            f"needs jax {text}, the last that writes PTX, and this is {jax.__version__}: use a "
            "Python 3.11 environment"
        )
    versions = {name: _version(name) for name in (*_PLUGINS, *_PROGRAMS.values())}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return f"needs {' and '.join(missing)}: {INSTALL}"
    unlike = [name for name in _PLUGINS if versions[name] != jax.__version__]
    if unlike:
        return f"needs {' and '.join(unlike)} {jax.__version__}, the version of jax: {INSTALL}"
    return ""


def require() -> None:
    """Checks that the compiler is installed.

    Raises:
      BadInputError: it is not; the message has the command that installs it.
    """
    if reason := unsupported_reason():
        raise BadInputError(f"compiling for a GPU {reason}")


def compilers() -> dict[str, str]:
    """Versions of the compilers, on which the figures depend."""
    return {"jax": jax.__version__, "ptxas": _version(_PROGRAMS["ptxas"]) or "none"}


def program(name: str) -> str:
    """The path of `ptxas` or `nvdisasm` inside its wheel."""
    distribution = importlib.metadata.distribution(_PROGRAMS[name])
    (file,) = [file for file in distribution.files or () if file.parts[-2:] == ("bin", name)]
    return str(distribution.locate_file(file))


def lower(function: Callable[..., Any], *arguments: Any) -> jax.stages.Lowered:
    """Lowers `function` for the target; the arguments are arrays or their shapes."""
    device = AbstractDevice(
        device_kind=TARGET.device_kind, num_cores=_MULTIPROCESSORS, platform="gpu"
    )
    mesh = AbstractMesh((), (), abstract_device=device)
    with dispatch.on(TARGET), jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))


def compile_(function: Callable[..., Any], *arguments: Any, dump: Path) -> jax.stages.Compiled:
    """Compiles `function` for one device of the target; XLA writes PTX and more into `dump`.

    Raises:
      BadInputError: the compiler is not installed.
      NotCompiledError: XLA or Triton refuses, as for too much shared memory.
    """
    require()
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=_DEVICE, topology="1x1x1"
    )
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arguments
    )
    with dispatch.on(TARGET):
        lowered = jax.jit(function).lower(*arguments)
    try:
        return lowered.compile(compiler_options={"xla_dump_to": str(dump)})
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0].removesuffix(", context: []")
        raise NotCompiledError(f"does not compile for an {TARGET.device_kind}: {reason}") from error


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
