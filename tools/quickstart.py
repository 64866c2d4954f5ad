"""The first run of a new user: real weights audited, a small model trained, both reported.

    make quickstart

1. Fetches SmolLM2-135M (93 MB), a haystack of essays (18 MB) and the speeches of US presidents
   (8 MB) through the manifest.
2. Audits SmolLM2's attention: runs/quickstart/report.html.
3. Trains a small Prototype Transformer on the speeches, and writes down what its prototypes do:
   runs/speeches/concepts/concepts.html.
4. Makes SmolLM2's attention sparse, in eighty updates: runs/sparse_quickstart/report.html.

No account, no hub, no GPU, no torch; some nine minutes on two cores. What is done is not done
again.
"""

from collections.abc import Sequence
import subprocess
import sys
import time

from lm_jax.errors import UserError

ASSETS = ("smollm2", "wiki", "sotu")
AUDIT, SPEECHES, SPARSE = "runs/quickstart", "runs/speeches", "runs/sparse_quickstart"
COMMANDS: Sequence[tuple[str, ...]] = (
    (
        "polyattn_jax.audit",
        "--config=configs/polyattn/smollm2.py:quickstart",
        f"--workdir={AUDIT}",
    ),
    (
        "protot_jax.pretrain",
        "--config=configs/protot/quickstart.py",
        f"--workdir={SPEECHES}",
    ),
    ("protot_jax.concepts", f"--run={SPEECHES}"),
    (
        "sparse_jax.posttrain",
        "--config=configs/sparse/quickstart.py",
        f"--workdir={SPARSE}",
    ),
)
REPORTS = (
    f"{AUDIT}/report.html",
    f"{SPEECHES}/concepts/concepts.html",
    f"{SPARSE}/report.html",
)


def main() -> int:
    """Fetches, then runs each command in a process of its own, with its own flags and exit code."""
    from lm_jax import assets

    start = time.monotonic()
    try:
        for name in ASSETS:
            assets.fetch(name)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for command in COMMANDS:
        print(" ".join(["python", "-m", *command]), flush=True)
        done = subprocess.run([sys.executable, "-m", *command], check=False)
        if done.returncode:
            return done.returncode
    minutes, seconds = divmod(round(time.monotonic() - start), 60)
    print(f"in {minutes} min {seconds} s; open in a browser:", *REPORTS, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
