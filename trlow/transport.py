"""How a rank's bytes get into the arena of the next rank: over a link, or through host memory.

Over a link the rank's own copy engine writes there, and a kernel of it may. Through host memory
each of the two devices does one half of a copy by its own engine: the sender into pinned memory,
the next rank's device out of it. The second half is on a stream of that device which belongs to the
sender, so a capture makes both halves nodes of the sender's graph with an edge between them. No
rank waits for another, so this cannot hang. It is for devices that do not reach each other, and for
work that the GPUs' power limits: links that nothing crosses sleep, and leave their power to it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trlow.device import Events, Pinned, Streams
from trlow.nodes import is_capturing
from trlow.settings import variables_in_effect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trlow.device import Platform

__all__ = ["Neighbour", "Transport", "no_link", "transport", "transport_name"]

BY_ADDRESS = 4  # cudaMemcpyKind
PART_NBYTES = 4 << 20  # through host memory: the halves of a large copy go side by side
NO_PEERS = {"NCCL_P2P_DISABLE": ("1",), "NCCL_P2P_LEVEL": ("LOC", "0")}


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The rank that copies go to."""

    device: int
    base: int  # of its arena


class Transport(Protocol):
    """The way from one rank to the next. Every method is for the rank's own thread."""

    next: Neighbour | None  # set once all arenas are there; none for a single rank
    writable: bool  # kernels of this rank may write to the next one's arena, once prepared

    def prepare(self, first: int, nbytes: int, /) -> None:
        """Copies will go to bytes of the next arena from ``first`` on. Nothing is captured."""

    def copy(self, offset: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy from an address here to an offset there, which was prepared."""

    def join(self, stream: int) -> None:
        """Make ``stream`` wait for every copy so far, in a capture for those of the capture."""

    def drain(self) -> None:
        """Wait for what is on another device. Only outside the replay loop."""

    def close(self) -> None:
        """Give everything back. No graph may be alive."""


class PeerTransport:
    """Over a link: a copy is one node on the stream that it is enqueued on."""

    writable = True

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self.next: Neighbour | None = None

    def prepare(self, *_: int) -> None:
        """Let this device write to the next rank's memory, from here on."""
        if self.next is not None:
            cudart = self._platform.cudart
            if cudart.cudaDeviceEnablePeerAccess(self.next.device, 0):
                cudart.cudaGetLastError()  # it was enabled: no error that others should come upon

    def copy(self, offset: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue it."""
        if self.next is not None and nbytes:
            target = self.next.base + offset
            self._platform.cudart.cudaMemcpyAsync(target, source, nbytes, BY_ADDRESS, stream)

    def join(self, stream: int) -> None:
        """Nothing: the stream of a copy is the caller's."""

    def drain(self) -> None:
        """Nothing, as well."""

    def close(self) -> None:
        """Nothing: access stays, as others may use it."""


class HostTransport:
    """Through pinned memory, which has a place for every byte that is prepared."""

    writable = False

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self.next: Neighbour | None = None
        self._outboxes: list[tuple[range, Pinned]] = []
        self._stack = ExitStack()
        self._beyond: int | None = None  # the stream on the next rank's device

    def prepare(self, first: int, nbytes: int) -> None:
        """Pin memory, unless what there is holds these bytes. Raises ``CudaError``.

        It stays pinned until ``close``.
        """
        if self.next is None:
            return
        if self._beyond is None:
            self._here = Events(self._platform)
            self._there = Events(self._platform)
            self._stack.callback(self._here.close)
            self._stack.callback(self._there.close)
            with self._platform.on(self.next.device):
                streams = Streams(self._platform, ("beyond",))
                self._stack.callback(streams.close)
                self._there["arrived"]  # an event is of the device that is current
            self._here["left"]
            self._beyond = streams["beyond"]
        if self._outbox(first, nbytes) is None:
            pinned = Pinned(self._platform, nbytes)
            self._stack.callback(pinned.close)
            self._outboxes.append((range(first, first + nbytes), pinned))

    def _outbox(self, offset: int, nbytes: int) -> int | None:
        """The address where these bytes of the next arena are on their way."""
        for held, pinned in self._outboxes:
            if held.start <= offset and offset + nbytes <= held.stop:
                return pinned.address + offset - held.start
        return None

    def copy(self, offset: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue both halves, the second one part behind the first."""
        if self.next is None or not nbytes:
            return
        outbox, beyond, cudart = self._outbox(offset, nbytes), self._beyond, self._platform.cudart
        if outbox is None or beyond is None:
            message = f"copy to bytes {offset} to {offset + nbytes}, which were not prepared"
            raise RuntimeError(message)
        target, left = self.next.base + offset, self._here["left"]
        for start in range(0, nbytes, PART_NBYTES):
            part = min(PART_NBYTES, nbytes - start)
            between = outbox + start
            cudart.cudaMemcpyAsync(between, source + start, part, BY_ADDRESS, stream)
            cudart.cudaEventRecord(left, stream)
            with self._platform.on(self.next.device):
                cudart.cudaStreamWaitEvent(beyond, left, 0)
                cudart.cudaMemcpyAsync(target + start, between, part, BY_ADDRESS, beyond)

    def join(self, stream: int) -> None:
        """Wait for the stream beyond, unless this is a capture that nothing has left."""
        beyond = self._beyond
        if beyond is None or self.next is None:
            return
        if is_capturing(self._platform, stream) and not is_capturing(self._platform, beyond):
            return
        arrived = self._there["arrived"]
        with self._platform.on(self.next.device):
            self._platform.cudart.cudaEventRecord(arrived, beyond)
        self._platform.cudart.cudaStreamWaitEvent(stream, arrived, 0)

    def drain(self) -> None:
        """Wait for the stream beyond: where work fails amid a step nothing has joined it."""
        if self._beyond is not None:
            self._platform.cudart.cudaStreamSynchronize(self._beyond)

    def close(self) -> None:
        """Give stream, events and memory back; a second call does nothing."""
        self._beyond = None
        self._outboxes.clear()
        self._stack.close()


def transport(name: str, platform: Platform) -> Transport:
    """The transport of one rank by its name: "peer" or "host"."""
    kind = HostTransport if name == "host" else PeerTransport
    return kind(platform)


def transport_name(asked: str, platform: Platform, devices: Sequence[int]) -> str:
    """What "auto" means for these devices: "peer" where there are links, else "host"."""
    if asked != "auto":
        return asked
    return "peer" if no_link(platform, devices) is None else "host"


def no_link(platform: Platform, devices: Sequence[int]) -> str | None:
    """Why ranks do not copy over links; None if they may. The host device has them."""
    if platform.name == "host" or len(devices) == 1:
        return None
    environment = variables_in_effect()
    for name, values in NO_PEERS.items():
        if environment.get(name) in values:
            return f"{name}={environment[name]} says that GPUs may not reach each other"
    for device, peer in zip(devices, (*devices[1:], devices[0]), strict=True):
        if not platform.reaches(device, peer):
            return f"device {device} does not reach the memory of device {peer} over NVLink"
    return None
