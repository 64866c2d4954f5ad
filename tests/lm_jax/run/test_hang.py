"""A process without progress ends with its stacks, and one with progress goes on."""

import os
from pathlib import Path
import subprocess
import sys
import textwrap

ROOT = Path(__file__).parents[3]


def run(code):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )


def test_a_hang_ends_with_its_stacks():
    """Also where the interpreter's lock is held for good: no thread of Python could run."""
    ended = run(
        """
        import ctypes
        from lm_jax.run import hang

        def stuck():
            ctypes.PyDLL(None).sleep(100)

        with hang.limit(1):
            stuck()
        """
    )
    assert ended.returncode == 1
    assert "Timeout (0:00:01)!" in ended.stderr
    assert "in stuck" in ended.stderr


def test_progress_starts_the_time_anew_and_the_end_of_the_context_ends_it():
    ended = run(
        """
        import faulthandler, time
        from lm_jax.run import hang

        with hang.limit(2):
            started = faulthandler.dump_traceback_later
            calls = []
            faulthandler.dump_traceback_later = lambda *args, **how: (
                calls.append((args, how)), started(*args, **how)
            )
            hang.progress()
            hang.progress()
        time.sleep(2.5)
        hang.progress()
        with hang.limit(0):
            hang.progress()
        print(calls)
        """
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, str([((2,), {"exit": True})] * 2))
