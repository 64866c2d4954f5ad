"""Audits pretrained weights, trains small models, finds circuits, draws a graph: five reports.

    iaj quickstart
    iaj quickstart | tee quickstart.txt        also save the output

1. Fetches SmolLM2-135M (93 MB), a haystack of essays (18 MB) and the speeches of US presidents
   (8 MB) through the manifest.
2. Audits SmolLM2's attention: runs/quickstart/report.html.
3. Trains a small Prototype Transformer on the speeches and reports its concepts:
   runs/speeches/concepts/concepts.html.
4. Trains a small dense model to copy letters, and makes a sparse one of it:
   runs/pair_quickstart/report.html.
5. Finds the heads and edges with which both copy: runs/circuits_quickstart/report.html.
6. Trains a transcoder of the dense one, and draws the attribution graph of one copied letter:
   runs/graph_quickstart/report.html.

It needs no account, hub, GPU or torch, and takes some minutes on two cores. Finished steps are
not repeated. In a checkout, `make quickstart` also sets up the environment.
"""

import argparse
from collections.abc import Sequence
import signal
import subprocess
import sys
import time

from iaj.parser import Parser, run_parsed
from lm_jax import assets

ASSETS = ("smollm2", "wiki", "sotu")
AUDIT, SPEECHES = "runs/quickstart", "runs/speeches"
PAIR, CIRCUITS = "runs/pair_quickstart", "runs/circuits_quickstart"
TRANSCODER, GRAPH = "runs/clt_quickstart", "runs/graph_quickstart"
_TEXT = f"--config.corpus.source={PAIR}/text/pretrain.jsonl"
COMMANDS: Sequence[tuple[str, ...]] = (
    ("polyattn", "audit", "--config=polyattn/smollm2:quickstart", f"--workdir={AUDIT}"),
    ("protot", "pretrain", "--config=protot/quickstart", f"--workdir={SPEECHES}"),
    ("protot", "concepts", f"--run={SPEECHES}"),
    ("sparse", "pair", "--config=sparse/pair:quickstart", f"--workdir={PAIR}"),
    ("sparse", "circuits", f"--pair={PAIR}", "--task=copy", f"--workdir={CIRCUITS}"),
    (
        *("sparse", "transcoder", "--config=sparse/transcoder:quickstart"),
        *(f"--config.model={PAIR}/dense/model", _TEXT, f"--workdir={TRANSCODER}"),
    ),
    (
        *("sparse", "graph", f"--model={PAIR}/dense/model", _TEXT),
        *(f"--transcoder={TRANSCODER}/transcoder", "--config.context=40"),
        *("--prompt=G T Z Q Y M H L V C, G T Z Q Y M H L V", f"--workdir={GRAPH}"),
    ),
)
REPORTS = (
    f"{AUDIT}/report.html",
    f"{SPEECHES}/concepts/concepts.html",
    f"{PAIR}/report.html",
    f"{CIRCUITS}/report.html",
    f"{GRAPH}/report.html",
)


def run(arguments: argparse.Namespace) -> int:
    """Fetches the assets, then runs each command in its own process."""
    del arguments
    start = time.monotonic()
    for name in ASSETS:
        assets.fetch(name)
    for command in COMMANDS:
        print(" ".join(["iaj", *command]), flush=True)
        if code := _run_step(command):
            return code
    minutes, seconds = divmod(round(time.monotonic() - start), 60)
    print(f"in {minutes} min {seconds} s; open in a browser:", *REPORTS, sep="\n  ")
    return 0


def _run_step(command: Sequence[str]) -> int:
    """The exit code of a command of `iaj` in a process of its own, as a shell has it.

    Ctrl-C reaches that process too, which saves its state and ends; a second one ends it at once.
    """
    # A handler, not SIG_IGN, which the process would inherit; set before it starts, so that no
    # signal finds this one between starting it and waiting for it.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        code = subprocess.call([sys.executable, "-m", "iaj", *command])
    finally:
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of the first step that fails, or 0."""
    return run_parsed(run, Parser("iaj quickstart", __doc__), argv)


if __name__ == "__main__":
    sys.exit(main())
