"""JAX's persistent compilation cache: a command that was run before compiles nothing.

Every command keeps its compiled programs in the user's cache folder, `compiled/<machine>`, beside
the assets (`user_cache`). `--compilation_cache=DIR` moves it and `--compilation_cache=off`
disables it; where the environment configures JAX's cache (JAX_COMPILATION_CACHE_DIR,
JAX_ENABLE_COMPILATION_CACHE), that replaces the default.

JAX's key of a program holds the program, its options and the versions of its compiler, but not all
features of the CPU, and a folder may be shared between machines; hence a folder per machine. An
entry that cannot be read, because the process that wrote it was killed or the disk was full, is
removed and written again.
"""

from collections.abc import Iterator
import contextlib
import glob
import hashlib
import logging
import os
from pathlib import Path
import platform
import re
import sys
from typing import Any
import warnings

from lm_jax.errors import StorageError
from lm_jax.run import user_cache

OFF = "off"
_VARIABLES = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")
_LIMIT_BYTES = 4 * 2**30
_UNREADABLE = re.compile(
    r"Error (?:reading|writing) persistent compilation cache entry for '(.*?)'"
)
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def cache(choice: str | None = None, *, by_source: bool = False) -> Iterator[Path | None]:
    """Context in which programs are read from and written to the cache; yields its folder.

    Args:
      choice: "off", a folder, or None for the default.
      by_source: the key of a program holds the names of its operations, so that a trace shows those
        of this source.

    Raises:
      StorageError: the folder `choice` cannot be created. Without the default one nothing is
        cached.
    """
    if choice is None and any(name in os.environ for name in _VARIABLES):
        yield None
        return
    if choice == OFF:
        with _configured(jax_enable_compilation_cache=False):
            yield None
        return
    folder = Path(choice) if choice else user_cache.folder() / "compiled" / machine()
    folder = folder.expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        prune(folder, _LIMIT_BYTES)
    except OSError as error:
        if choice:
            raise StorageError(
                f"--compilation_cache={choice} cannot be used ({error.strerror}); name another "
                f"folder, or --compilation_cache={OFF}"
            ) from error
        _log.info("%s cannot be used (%s): nothing compiled is kept", folder, error.strerror)
        yield None
        return
    options = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(folder),
        # JAX's default is programs of over a second; the many small ones take longer in total.
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_compilation_cache_include_metadata_in_key": by_source,
    }
    with _configured(**options), _mending(folder):
        yield folder


def machine() -> str:
    """A hash of the CPU's features, on which compiled programs depend."""
    known = [platform.system(), platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
        known += sorted({s for s in lines if s.startswith(("model name", "flags", "Features"))})
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:12]


def prune(folder: Path, limit: int) -> None:
    """Removes the least recently used entries until at most `limit` bytes are left."""
    entries = []
    for entry in os.scandir(folder):
        if entry.is_file() and entry.name.endswith("-cache"):
            result = entry.stat()
            entries.append((max(result.st_atime, result.st_mtime), result.st_size, entry.path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= limit:
            return
        Path(path).unlink(missing_ok=True)
        total -= size


@contextlib.contextmanager
def _configured(**options: Any) -> Iterator[None]:
    """Sets options of JAX, whether or not the process has imported it."""
    before = {name.upper(): os.environ.get(name.upper()) for name in options}
    os.environ.update({name.upper(): _as_text(value) for name, value in options.items()})
    restore = contextlib.ExitStack()
    if "jax" in sys.modules:
        import jax
        from jax.experimental.compilation_cache import compilation_cache

        # JAX decides whether to cache when it first compiles.
        restore.callback(compilation_cache.reset_cache)
        for name, value in options.items():
            restore.callback(jax.config.update, name, jax.config.values[name])
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text
        restore.close()


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@contextlib.contextmanager
def _mending(folder: Path) -> Iterator[None]:
    """Removes an entry that JAX warns of, in place of the warning."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def mend(message: Warning | str, *rest: Any, **named: Any) -> None:
            result = _UNREADABLE.match(str(message))
            if result is None:
                show(message, *rest, **named)
                return
            _log.info("%s", message)
            for damaged in folder.glob(f"{glob.escape(result[1])}-*-cache"):
                with contextlib.suppress(OSError):
                    damaged.unlink()

        warnings.showwarning = mend
        yield
