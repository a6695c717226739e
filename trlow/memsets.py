"""Memsets of a captured graph, made kernels.

Between two kernels of a graph a memset runs on a copy engine. From kernel to kernel that is 6 us in
a trace of an H200, and 9 where an engine copies to a peer as well; with a kernel in its place it is
2. Torch, cuBLAS and cuDNN clear counters and workspaces by the dozen in every step.
"""

from __future__ import annotations

from ctypes import byref, c_size_t, c_void_p
from typing import TYPE_CHECKING, Any

from trlow.binding.driver import GraphEdgeData, MemsetNodeParams
from trlow.nodes import nodes_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from ctypes import Array

    from trlow.device import Platform
    from trlow.kernel import Kernels

CLEAR = "clear"
CHUNK = 16  # bytes that one work item of the kernel stores
MEMSET, ALLOCATING = 2, (10, 11)  # cudaGraphNodeType
EDGES_SINCE = 12030  # version of CUDA


def replace_memsets(platform: Platform, kernels: Kernels, graph: int) -> None:
    """Replace every memset of ``graph`` that sets one row to 0 and has only plain edges.

    Child graphs stay as they are. None is replaced where the driver is too old to be asked for
    edges, nor in a graph that allocates or frees memory, whose nodes cannot be destroyed.
    """
    nodes = nodes_of(platform, graph)
    if platform.driver.version < EDGES_SINCE or any(kind in ALLOCATING for _, kind in nodes):
        return
    for node, kind in nodes:
        if kind == MEMSET:
            _replace(platform, kernels, graph, node)


def _replace(platform: Platform, kernels: Kernels, graph: int, node: int) -> None:
    driver, memset = platform.driver, MemsetNodeParams()
    driver.cuGraphMemsetNodeGetParams(node, byref(memset))
    before = _neighbours(driver.cuGraphNodeGetDependencies_v2, node)
    after = _neighbours(driver.cuGraphNodeGetDependentNodes_v2, node)
    if memset.value or memset.height > 1 or before is None or after is None:
        return
    nbytes = memset.width * memset.elementSize
    clear = kernels.add_node(CLEAR, (memset.dst, nbytes), -(-nbytes // CHUNK), graph, before)
    if len(after):
        same = (c_void_p * len(after))(*[clear] * len(after))
        driver.cuGraphAddDependencies_v2(graph, same, after, None, len(after))
    driver.cuGraphDestroyNode(node)


def _neighbours(ask: Callable[..., Any], node: int) -> Array[c_void_p] | None:
    """The nodes at one side; None where an edge is more than an order of two nodes."""
    count = c_size_t()
    ask(node, None, None, byref(count))
    nodes, edges = (c_void_p * count.value)(), (GraphEdgeData * count.value)()
    if count.value:
        ask(node, nodes, edges, byref(count))
    return nodes if not any(bytes(edges)) else None
