"""Questions about a graph's nodes and changes of their order: as CUDA's driver answers."""

from __future__ import annotations

from ctypes import addressof, byref, c_size_t, c_void_p

import numpy as np
import pytest

from trlow.binding.driver import GraphEdgeData, KernelNodeParams, MemsetNodeParams
from trlow.errors import CudaError

pytestmark = pytest.mark.timeout(60)

THREAD_LOCAL = 1
KERNEL = 0


@pytest.fixture
def chain(machine):
    """A graph that sets, clears and scales, and what it works on."""
    stream = machine.stream()
    address, view = machine.array([3.0] * 8, np.float32)
    factor, _ = machine.array([2.0], np.float32)
    machine.function("scale_f32")
    machine.cudart.cudaStreamBeginCapture(stream, THREAD_LOCAL)
    machine.scale(stream, address, factor, 8)
    machine.cudart.cudaMemsetAsync(address, 0, 16, stream)
    machine.scale(stream, address, factor, 8)
    return machine.end_capture(stream), stream, address, view


def handles(machine, graph):
    count = c_size_t()
    machine.cudart.cudaGraphGetNodes(graph, None, byref(count))
    found = (c_void_p * count.value)()
    machine.cudart.cudaGraphGetNodes(graph, found, byref(count))
    return list(found)


def neighbours(ask, node):
    count = c_size_t()
    ask(node, None, None, byref(count))
    nodes, edges = (c_void_p * count.value)(), (GraphEdgeData * count.value)()
    ask(node, nodes, edges, byref(count))
    assert not any(bytes(edges))
    return list(nodes)


def node_of(machine, graph, name, before, *values):
    words = (c_size_t * len(values))(*values)
    places = (addressof(words) + 8 * index for index in range(len(values)))
    pointers = (c_void_p * len(values))(*places)
    made = c_void_p()
    launch = KernelNodeParams(machine.function(name), 1, 1, 1, 32, 1, 1, 0, pointers)
    after = (c_void_p * len(before))(*before)
    machine.driver.cuGraphAddKernelNode_v2(byref(made), graph, after, len(before), byref(launch))
    return made.value


def test_neighbours_of_a_chain(machine, chain):
    graph, *_ = chain
    first, middle, last = handles(machine, graph)
    before = machine.driver.cuGraphNodeGetDependencies_v2
    after = machine.driver.cuGraphNodeGetDependentNodes_v2
    assert [neighbours(before, node) for node in (first, middle, last)] == [[], [first], [middle]]
    assert [neighbours(after, node) for node in (first, middle, last)] == [[middle], [last], []]


def test_a_memset_tells_what_it_sets(machine, chain):
    graph, _, address, _ = chain
    _, middle, last = handles(machine, graph)
    found = MemsetNodeParams()
    machine.driver.cuGraphMemsetNodeGetParams(middle, byref(found))
    assert (found.dst, found.value, found.width * found.elementSize) == (address, 0, 16)
    assert found.height == 1
    with pytest.raises(CudaError):
        machine.driver.cuGraphMemsetNodeGetParams(last, byref(found))


def test_a_node_takes_the_place_of_another(machine, chain):
    graph, stream, address, view = chain
    first, middle, last = handles(machine, graph)
    made = node_of(machine, graph, "clear", [first], address, 8)
    machine.driver.cuGraphAddDependencies_v2(
        graph, (c_void_p * 1)(made), (c_void_p * 1)(last), None, 1
    )
    machine.driver.cuGraphDestroyNode(middle)
    assert machine.nodes(graph) == [KERNEL, KERNEL, KERNEL]
    assert handles(machine, graph) == [first, made, last]
    machine.replay(machine.instantiate(graph), stream)
    machine.sync(stream)
    assert list(view) == [0, 0, 12, 12, 12, 12, 12, 12]


def test_what_was_instantiated_before_does_not_change(machine, chain):
    graph, stream, _, view = chain
    ready = machine.instantiate(graph)
    for node in handles(machine, graph):
        machine.driver.cuGraphDestroyNode(node)
    assert machine.nodes(graph) == []
    machine.replay(ready, stream)
    machine.sync(stream)
    assert list(view) == [0, 0, 0, 0, 12, 12, 12, 12]


def test_an_order_that_closes_a_circle_is_refused_and_changes_nothing(machine, chain):
    graph, *_ = chain
    first, middle, last = handles(machine, graph)
    with pytest.raises(CudaError):
        machine.driver.cuGraphAddDependencies_v2(
            graph, (c_void_p * 1)(last), (c_void_p * 1)(first), None, 1
        )
    assert handles(machine, graph) == [first, middle, last]
    before = machine.driver.cuGraphNodeGetDependencies_v2
    assert neighbours(before, first) == []


@pytest.mark.parametrize("pair", [(0, 1), (1, 1)])
def test_an_edge_that_is_there_or_to_itself_is_refused(machine, chain, pair):
    graph, *_ = chain
    nodes = handles(machine, graph)
    ends = [(c_void_p * 1)(nodes[k]) for k in pair]
    with pytest.raises(CudaError):
        machine.driver.cuGraphAddDependencies_v2(graph, *ends, None, 1)
    assert handles(machine, graph) == nodes


def test_a_new_first_node_moves_to_the_front(machine, chain):
    graph, stream, address, view = chain
    first, *_ = old = handles(machine, graph)
    made = node_of(machine, graph, "clear", [], address + 16, 16)
    machine.driver.cuGraphAddDependencies_v2(
        graph, (c_void_p * 1)(made), (c_void_p * 1)(first), None, 1
    )
    assert handles(machine, graph) == [made, *old]
    machine.replay(machine.instantiate(graph), stream)
    machine.sync(stream)
    assert not view.any()


def test_handles_of_others_are_refused(machine, chain):
    graph, _, address, _ = chain
    other = c_void_p()
    machine.cudart.cudaGraphCreate(byref(other), 0)
    empty = c_void_p()
    machine.cudart.cudaGraphAddEmptyNode(byref(empty), other.value, None, 0)
    with pytest.raises(CudaError):
        node_of(machine, graph, "clear", [empty.value], address, 8)
    node = handles(machine, graph)[0]
    with pytest.raises(CudaError):
        machine.driver.cuGraphAddDependencies_v2(
            graph, (c_void_p * 1)(empty.value), (c_void_p * 1)(node), None, 1
        )
    for ask in ("cuGraphNodeGetDependencies_v2", "cuGraphNodeGetDependentNodes_v2"):
        with pytest.raises(CudaError):
            getattr(machine.driver, ask)(None, None, None, byref(c_size_t()))
    with pytest.raises(CudaError):
        machine.driver.cuGraphDestroyNode(None)
    bare = c_void_p()
    machine.cudart.cudaGraphCreate(byref(bare), 0)
    with pytest.raises(CudaError):  # which has no node that could stand wrong
        machine.driver.cuGraphAddDependencies_v2(
            bare.value, (c_void_p * 1)(empty.value), (c_void_p * 1)(node), None, 1
        )
    machine.cudart.cudaGraphDestroy(bare.value)
    assert len(handles(machine, graph)) == 3
    machine.cudart.cudaGraphDestroy(other.value)
