"""The first run of a new user: fetch a real model, audit it, say where the report is.

    make quickstart

Fetches SmolLM2-135M (93 MB) and a haystack of essays (18 MB) through the manifest, then runs the
audit's quickstart mode. No account, no hub, no GPU, no torch.
"""

import subprocess
import sys

from lm_jax.errors import Refusal

WORKDIR = "runs/quickstart"
CONFIG = "configs/polyattn/smollm2.py:quickstart"
ASSETS = ("smollm2", "wiki")


def main() -> int:
    """Fetches, then audits in a process of its own, so that its flags and exit code are its own."""
    from lm_jax import assets

    try:
        for name in ASSETS:
            assets.fetch(name)
    except Refusal as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    command = [
        sys.executable,
        "-m",
        "polyattn_jax.audit",
        f"--config={CONFIG}",
        f"--workdir={WORKDIR}",
    ]
    print(" ".join(["python", *command[1:]]), flush=True)
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
