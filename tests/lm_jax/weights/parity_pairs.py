"""Commands as processes of their own, by themselves or two of one run."""

from concurrent.futures import ThreadPoolExecutor
import os
from pathlib import Path
import subprocess
import sys

import portpicker

ROOT = Path(__file__).parents[3]
# Seconds after which a process that waits for one that is gone would be killed.
LIMIT = 150


def launch(command, config, folder, *, devices, flags=(), before=()):
    """One process of a command, a module and its words, with so many devices of its own.

    `before` are words before those of the interpreter.
    """
    # Of two settings of one flag, XLA takes the later.
    counted = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [
            *(*before, sys.executable, "-m", *command.split()),
            *(f"--config={config}", f"--workdir={folder}", *flags),
        ],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {counted}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def launch_pair(command, config, folder, *flags):
    """Both processes, with a device each."""
    port = portpicker.pick_unused_port()
    shared = (f"--coordinator=127.0.0.1:{port}", "--processes=2", *flags)
    return [
        launch(command, config, folder, devices=1, flags=(*shared, f"--process={index}"))
        for index in range(2)
    ]


def end(processes, limit=LIMIT):
    """Exit codes, standard outputs and standard errors."""
    try:
        # At once: a process whose pipe is full would keep the others waiting.
        with ThreadPoolExecutor() as readers:
            said = list(readers.map(lambda each: each.communicate(timeout=limit), processes))
    finally:
        for process in processes:
            process.kill()
    outs, errs = zip(*said, strict=True)
    return [process.returncode for process in processes], outs, errs
