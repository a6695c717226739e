"""A worker process as the command sees it: asked with a deadline, ended by a signal where it hangs.

It has a session of its own, so that Ctrl-C reaches the command alone, which then ends it.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trlow.bench.job import Job
from trlow.errors import TrlowError, UsageError

ROOT = Path(__file__).resolve().parents[2]  # what a worker imports trlow from
START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from trlow.bench.worker import main; main()"
)
LAST_WORDS = 3  # lines of stderr that are told of a worker that died
GRACE_S = 5.0


class WorkerError(TrlowError):
    """A worker refused, died or hung; `hung` and `died` say which."""

    def __init__(self, message: str, *, hung: bool = False, died: bool = False) -> None:
        self.hung = hung
        self.died = died
        super().__init__(message)


class WorkerProcess:
    """One worker. `ask` sends a request and waits for its answer; any error ends the worker."""

    def __init__(self, command: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed by kill
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        self._buffer = b""
        self._asked = ""

    def send(self, do: str, **values: Any) -> None:
        """Send a request without waiting."""
        self._asked = " ".join((do, *(str(value) for value in values.values())))
        stream = self._process.stdin
        if stream is None or self._process.poll() is not None:
            raise self._died()
        try:
            stream.write(json.dumps({"do": do, **values}).encode() + b"\n")
            stream.flush()
        except BrokenPipeError:
            raise self._died() from None

    def receive(self, deadline_s: float) -> dict[str, Any]:
        """The answer to the last request. Raises WorkerError, UsageError."""
        line = self._line(deadline_s)
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            raise self._died() from None
        if found.pop("ok"):
            return found
        self.kill()
        error = str(found["error"])
        raise UsageError(error) if found["usage"] else WorkerError(error)

    def ask(self, deadline_s: float, do: str, **values: Any) -> dict[str, Any]:
        """Send and receive."""
        self.send(do, **values)
        return self.receive(deadline_s)

    def _line(self, deadline_s: float) -> bytes:
        stream = self._process.stdout
        assert stream is not None  # it was asked for
        deadline = time.monotonic() + deadline_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([stream], [], [], max(0.0, left))
            if not ready:
                self.kill()
                raise WorkerError(
                    f"no answer to {self._asked!r} within {deadline_s:g} s: hung; the worker was "
                    "ended",
                    hung=True,
                )
            read = os.read(stream.fileno(), 1 << 16)
            if not read:
                raise self._died()
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _died(self) -> WorkerError:
        code = self._ended()
        said = self.last_words()
        return WorkerError(
            f"the worker ended with {code} at {self._asked!r}" + (f": {said}" if said else ""),
            died=True,
        )

    def _ended(self) -> int:
        try:
            return self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()

    def last_words(self) -> str:
        """The end of what it wrote to stderr."""
        if self._errors.closed:
            return ""
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace")
        return " | ".join(
            [line.strip() for line in text.splitlines() if line.strip()][-LAST_WORDS:]
        )

    def close(self, deadline_s: float) -> None:
        """Let it give everything back, then end it."""
        try:
            if self._process.poll() is None:
                self.ask(deadline_s, "close")
        finally:
            self.kill()

    def kill(self) -> None:
        """End it now; a second call does nothing. What runs on a GPU ends with its process."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._errors.close()


def start(job: Job, variables: Mapping[str, str]) -> WorkerProcess:
    """A worker for `job` with `variables` added to the environment."""
    added = [f"{name}={value}" for name, value in variables.items()]
    python = [sys.executable, "-c", START, str(ROOT), job.to_json()]
    return WorkerProcess(["env", *added, *python])
