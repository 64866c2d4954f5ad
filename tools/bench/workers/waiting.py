"""A process that waits between its turns, as of a library that has an environment of its own."""

from collections.abc import Mapping, Sequence
import contextlib
import json
import os
import subprocess
from typing import Any

from lm_jax.errors import UsageError


class Waiting:
    """A worker that writes a line of JSON once it is ready, and one for each line that it reads."""

    def __init__(
        self, command: Sequence[str], what: str, environment: Mapping[str, str] | None = None
    ) -> None:
        """Starts it and waits until it is ready.

        Args:
          command: interpreter and arguments.
          what: words for an error: the flag that names the interpreter, and what runs there.
          environment: variables beside those of this process.

        Raises:
          UsageError: it ended without a line.
        """
        self._what = what
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | dict(environment or {}),
        )
        self.started = self._read()

    def run(self, line: str = "run") -> dict[str, Any]:
        """One turn, and what it says of it."""
        assert self._process.stdin is not None
        # What has ended reads nothing; what it wrote last says so.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise UsageError(f"{self._what} did not go on; its error is above")
        return json.loads(line)
