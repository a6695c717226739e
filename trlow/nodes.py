"""Nodes placed by hand into a stream's capture: child graphs, and leaves that nobody waits for.

CUDA records no launch of a graph (900) and no branch that is not joined again (904). Both can be
had by changing what the stream's next node depends on (driver API, stream management).
"""

from __future__ import annotations

from ctypes import POINTER, byref, c_int, c_size_t, c_uint64, c_void_p, cast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trlow.binding.driver import GraphEdgeData

if TYPE_CHECKING:
    from collections.abc import Callable
    from ctypes import Array

    from trlow.device import Platform

NOT_CAPTURING, INVALIDATED = 0, 2  # cudaStreamCaptureStatus
SET_DEPENDENCIES = 1  # CU_STREAM_SET_CAPTURE_DEPENDENCIES


@dataclass(frozen=True, slots=True)
class Place:
    """Where a capture of a stream stands: its graph, and what the next node will depend on."""

    graph: int
    nodes: Array[c_void_p]
    edges: Array[GraphEdgeData] | None

    def is_same(self, other: Place) -> bool:
        """Whether nothing was recorded between the two."""
        return self.graph == other.graph and list(self.nodes) == list(other.nodes)


def capture_status(platform: Platform, stream: int) -> int:
    """The cudaStreamCaptureStatus of ``stream``."""
    status = c_int()
    platform.cudart.cudaStreamIsCapturing(stream, byref(status))
    return status.value


def is_capturing(platform: Platform, stream: int) -> bool:
    """Whether what is enqueued on ``stream`` is recorded."""
    return capture_status(platform, stream) != NOT_CAPTURING


def place_of(platform: Platform, stream: int) -> Place:
    """The place of a capturing stream, as a copy: the driver's arrays live until its next call."""
    status, identity, count = c_int(), c_uint64(), c_size_t()
    graph, nodes, edges = c_void_p(), POINTER(c_void_p)(), POINTER(GraphEdgeData)()
    platform.driver.cuStreamGetCaptureInfo_v3(
        stream,
        byref(status),
        byref(identity),
        byref(graph),
        byref(nodes),
        byref(edges),
        byref(count),
    )
    own_nodes = (c_void_p * count.value)(*(nodes[index] for index in range(count.value)))
    own_edges = None
    if cast(edges, c_void_p).value:  # null where every edge is plain
        own_edges = (GraphEdgeData * count.value)(*(edges[index] for index in range(count.value)))
    return Place(graph.value or 0, own_nodes, own_edges)


def go_to(platform: Platform, stream: int, place: Place) -> None:
    """Make the stream's next node depend on what it depended on at ``place``."""
    platform.driver.cuStreamUpdateCaptureDependencies_v2(
        stream, place.nodes, place.edges, len(place.nodes), SET_DEPENDENCIES
    )


def add_leaf(
    platform: Platform, stream: int, enqueue: Callable[[], None], after: int | None
) -> tuple[Place, int]:
    """Record what ``enqueue`` puts on ``stream`` on a side branch: what follows ignores it.

    ``enqueue`` adds one node; it also waits for the node ``after``, so that all leaves of a graph
    make one branch. Returns the place where it hangs, and the node.
    """
    place = place_of(platform, stream)
    if after is not None:
        both = (c_void_p * (len(place.nodes) + 1))(*place.nodes, after)
        edges = None
        if place.edges is not None:
            edges = (GraphEdgeData * len(both))(*place.edges)
        go_to(platform, stream, Place(place.graph, both, edges))
    enqueue()
    leaf = place_of(platform, stream).nodes[0]
    go_to(platform, stream, place)
    return place, leaf or 0


def nodes_of(platform: Platform, graph: int) -> list[tuple[int, int]]:
    """Every node of a graph with its cudaGraphNodeType."""
    cudart = platform.cudart
    count = c_size_t()
    cudart.cudaGraphGetNodes(graph, None, byref(count))
    if not count.value:
        return []
    nodes = (c_void_p * count.value)()
    cudart.cudaGraphGetNodes(graph, nodes, byref(count))
    found = []
    for node in nodes:
        code = c_int()
        cudart.cudaGraphNodeGetType(node, byref(code))
        found.append((node or 0, code.value))
    return found


def add_child(platform: Platform, stream: int, graph: int) -> None:
    """Put a copy of ``graph`` (cudaGraph_t) behind what ``stream`` has recorded so far."""
    place = place_of(platform, stream)
    node = (c_void_p * 1)()
    platform.cudart.cudaGraphAddChildGraphNode(
        node, place.graph, place.nodes, len(place.nodes), graph
    )
    go_to(platform, stream, Place(place.graph, node, None))
