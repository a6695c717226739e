"""The process of one variant: opens devices, measures what it is told, answers in JSON lines.

`python -m trlow.bench.worker JOB` reads requests from stdin. Answers go to the stdout that it was
started with; file descriptor 1 then becomes stderr, because NCCL writes to it. When stdin ends the
process ends at once, so it never outlives the command that started it, and that command ends it by
a signal where NCCL hangs.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, create_string_buffer
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any

from trlow.arena import check_window
from trlow.bench.checking import check
from trlow.bench.crew import Crew
from trlow.bench.job import Job
from trlow.bench.timing import call_once, measure
from trlow.device import Platform
from trlow.errors import SettingsError, TrlowError, UsageError
from trlow.settings import Settings


class Server:
    """What one worker can be asked for."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._crew: Crew | None = None
        self._platform: Platform | None = None
        self._devices: tuple[int, ...] = ()
        self._settings = Settings()
        self._size = 0

    def hello(self) -> dict[str, Any]:
        """Look at machine and libraries; refuse what cannot be before anything is allocated."""
        job = self.job
        values = dict(job.settings)
        if job.variant.buffers == "window":
            values["arena"] = "window"
        self._settings = Settings.from_environment(**values)
        platform = self._platform = Platform.open(self._settings)
        self._devices = self._settings.devices(platform.device_count())
        ranks, nccl = len(self._devices), platform.nccl
        if nccl.version < job.element.nccl_since:
            since = nccl.interface.version_text(job.element.nccl_since)
            raise SettingsError(
                f"dtype {job.dtype} needs NCCL >= {since}, loaded {nccl.version_text} from "
                f"{nccl.path}"
            )
        if job.root >= ranks:
            raise SettingsError(f"-r {job.root}: there are ranks 0 to {ranks - 1}")
        check_window(self._settings, platform, ranks)
        for rank, device in enumerate(self._devices):
            free, _ = platform.memory(device)
            wanted = job.buffer_nbytes * len(job.buffers)
            if wanted > free:
                raise SettingsError(
                    f"size {job.most} needs {wanted} bytes, rank {rank} (device {device}) has "
                    f"{free} free; give a smaller -e"
                )
        return {"ranks": ranks, "devices": list(self._devices), **_facts(platform, self._devices)}

    def open(self) -> dict[str, Any]:
        """Make communicators and buffers."""
        if self._platform is None:
            raise UsageError("hello comes first")
        self._crew = Crew(self._platform, self.job, self._devices, self._settings.deadline_s)
        return {"selection": self._crew.links.selection}

    def measure(self, size: int, place: str) -> dict[str, Any]:
        """Time one size."""
        return asdict(measure(self._at(size), size, place))

    def check(self, size: int, place: str) -> dict[str, Any]:
        """Compare every element."""
        wrong, named = check(self._at(size), size, place)
        return {"wrong": wrong, "named": [str(one) for one in named]}

    def call(self, size: int, place: str) -> dict[str, Any]:
        """One collective, for what NCCL says of it in its log."""
        call_once(self._at(size), size, place)
        return {}

    def close(self) -> dict[str, Any]:
        """Give everything back."""
        if self._crew is not None:
            self._crew.close()
        return {}

    def _at(self, size: int) -> Crew:
        """The crew; graphs of another size go."""
        crew = self._crew
        if crew is None:
            raise UsageError("open comes first")
        if size != self._size:
            crew.drop_graphs()
            self._size = size
        return crew


def _facts(platform: Platform, devices: tuple[int, ...]) -> dict[str, Any]:
    """What libraries and devices say of themselves; asking allocates nothing."""
    names, buses, peers = [], [], []
    for device in devices:
        if platform.name == "host":
            names.append("host device")
            buses.append("")
            continue
        name, bus, handle = create_string_buffer(256), create_string_buffer(64), c_int()
        platform.driver.cuInit(0)
        platform.driver.cuDeviceGet(byref(handle), device)
        platform.driver.cuDeviceGetName(name, len(name), handle)
        platform.cudart.cudaDeviceGetPCIBusId(bus, len(bus), device)
        names.append(name.value.decode(errors="replace"))
        buses.append(bus.value.decode().lower())
        for other in devices:
            can = c_int()
            if other != device:
                platform.cudart.cudaDeviceCanAccessPeer(byref(can), device, other)
                peers.append(bool(can.value))
    libraries = {
        name: {"version": library.version_text, "path": library.path}
        for name, library in platform.libraries.items()
    }
    return {
        "platform": platform.name,
        "names": names,
        "buses": buses,
        "peer_access": all(peers),
        "libraries": libraries,
        "nccl_version": platform.nccl.version,
    }


def serve(server: Server, requests: Iterator[str], answer: Callable[[str], None]) -> None:
    """Answer each request; the first that fails is the last."""
    for line in requests:
        request = json.loads(line)
        do = request.pop("do")
        function = getattr(server, do)
        try:
            found = function(**request)
        except TrlowError as error:
            usage = do == "hello" and isinstance(error, UsageError)
            answer(json.dumps({"ok": False, "usage": usage, "error": str(error)}))
            return
        except Exception as error:
            answer(json.dumps({"ok": False, "usage": False, "error": repr(error)}))
            raise
        answer(json.dumps({"ok": True, **found}))


def _lines() -> Iterator[str]:
    """Requests as a thread reads them; the end of stdin ends the process wherever it stands."""
    queue: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            queue.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield queue.get()


@contextmanager
def _private_stdout() -> Iterator[Callable[[str], None]]:
    """A function that writes lines to the original stdout, which is now stderr for all others."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as stream:
        os.dup2(2, 1)

        def answer(text: str) -> None:
            print(text, file=stream, flush=True)

        yield answer


def main() -> None:
    """Serve until stdin ends or a request fails."""
    with _private_stdout() as answer:
        serve(Server(Job.from_json(sys.argv[1])), _lines(), answer)
    sys.stderr.flush()
    os._exit(1)  # a thread may hang in C after a failure, and an orderly end would wait for it


if __name__ == "__main__":
    main()
