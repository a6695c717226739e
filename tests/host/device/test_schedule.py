"""The seeded order: a missing edge shows, a right program never changes."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.timeout(60)

SEEDS = range(1, 21)


def write_and_read(machine, *, edge):
    """Stream one writes 2, stream two doubles it; `edge` orders them. The result."""
    first, second, event = machine.stream(), machine.stream(), machine.event()
    address, view = machine.array([1.0, 2.0], np.float32)
    factor, _ = machine.array([2.0], np.float32)
    machine.function("scale_f32")
    machine.cudart.cudaMemcpyAsync(address, address + 4, 4, 3, first)
    if edge:
        machine.cudart.cudaEventRecord(event, first)
        machine.cudart.cudaStreamWaitEvent(second, event, 0)
    machine.scale(second, address, factor, 1)
    machine.sync(first, second)
    return view[0]


def test_a_missing_edge_between_streams_shows_and_a_present_one_holds(machine):
    missing, present = set(), set()
    for seed in SEEDS:
        machine.configure(seed=seed)
        missing.add(write_and_read(machine, edge=False))
        present.add(write_and_read(machine, edge=True))
    assert missing == {2, 4}
    assert present == {4}


def fork_and_join(machine, *, edge):
    """The same inside one graph: two branches, with or without an edge between them."""
    first, second = machine.stream(), machine.stream()
    fork, between, join = (machine.event() for _ in range(3))
    address, view = machine.array([1.0, 2.0], np.float32)
    factor, _ = machine.array([2.0], np.float32)
    machine.function("scale_f32")
    machine.cudart.cudaStreamBeginCapture(first, 1)
    machine.cudart.cudaEventRecord(fork, first)
    machine.cudart.cudaStreamWaitEvent(second, fork, 0)
    machine.cudart.cudaMemcpyAsync(address, address + 4, 4, 3, first)
    if edge:
        machine.cudart.cudaEventRecord(between, first)
        machine.cudart.cudaStreamWaitEvent(second, between, 0)
    machine.scale(second, address, factor, 1)
    machine.cudart.cudaEventRecord(join, second)
    machine.cudart.cudaStreamWaitEvent(first, join, 0)
    exec_ = machine.instantiate(machine.end_capture(first))
    seen = set()
    for _ in range(10):
        view[0] = 1
        machine.replay(exec_, first)
        machine.sync(first)
        seen.add(view[0])
    return seen


def test_a_missing_edge_inside_a_graph_shows(machine):
    missing, present = set(), set()
    for seed in SEEDS:
        machine.configure(seed=seed)
        missing |= fork_and_join(machine, edge=False)
        present |= fork_and_join(machine, edge=True)
    assert missing == {2, 4}
    assert present == {4}


def test_collectives_and_order_in_a_stream_do_not_depend_on_the_seed(machine):
    for seed in (0, 1, 2, 3):
        machine.configure(seed=seed, workers=3)
        comms = machine.comms(4)
        streams = [machine.stream(rank) for rank in range(4)]
        arrays = [machine.array([rank + 0.1], np.float32, rank) for rank in range(4)]
        for _ in range(50):
            for rank in range(4):
                machine.all_reduce(rank, arrays[rank][0], 1, comms, streams, op=4)
                machine.cudart.cudaMemcpyAsync(
                    arrays[rank][0], arrays[rank][0], 4, 3, streams[rank]
                )
        machine.sync(*streams)
        assert len({view[0] for _, view in arrays}) == 1


def test_one_worker_and_many_workers_do_the_same(machine):
    for workers in (1, 16, 2):
        machine.configure(workers=workers)
        assert write_and_read(machine, edge=True) == 4


def test_the_seed_cannot_change_under_enqueued_work(machine):
    comms, stream = machine.comms(2), machine.stream()
    address, _ = machine.array([1.0], np.float32)
    machine.nccl.ncclAllReduce(address, address, 1, 7, 0, comms[0], stream)
    assert machine.code(machine.host.trlowHostConfigure, 4, 0, 5, 0) == 401
    assert machine.code(machine.host.trlowHostConfigure, 0, 0, 0, 0) == 1
    assert machine.code(machine.host.trlowHostConfigure, 4, -1, 0, 0) == 1
    machine.nccl.ncclCommAbort(comms[0])
    machine.forget(comms[0])
    machine.sync(stream)


@pytest.mark.parametrize("seed", [0, 7])
def test_kernels_run_as_blocks_of_fibers(machine, seed):
    machine.configure(seed=seed)
    stream = machine.stream()
    address, view = machine.array(np.arange(1000), np.float32)
    factor, _ = machine.array([3.0], np.float32)
    for grid, block in ((1, 1), (3, 64), (40, 256)):
        view[:] = np.arange(1000)
        machine.launch(stream, "scale_f32", address, factor, 1000, mode=1, grid=grid, block=block)
        machine.sync(stream)
        assert (view == 3 * np.arange(1000)).all()


def test_fibers_meet_at_barriers(machine):
    rows, channels = 300, 3
    x = np.random.default_rng(0).standard_normal((rows, channels)).astype(np.float32)
    means = []
    for mode, block in ((0, 256), (1, 256), (1, 96)):
        stream = machine.stream()
        source, _ = machine.array(x.ravel(), np.float32)
        outputs = [machine.array(np.zeros(channels), np.float32) for _ in range(4)]
        previous = [machine.array(np.zeros(channels), np.float32)[0] for _ in range(2)]
        scalars = [machine.array([value], np.float32)[0] for value in (0.1, 1e-5)]
        machine.launch(
            stream, "bn_stats", *(address for address, _ in outputs), *previous, source,
            *scalars, rows, channels, mode=mode, grid=channels, block=block,
        )  # fmt: skip
        machine.sync(stream)
        means.append(outputs[0][1].copy())
        assert np.allclose(means[-1], x.mean(0), atol=1e-6)
    assert (means[0] == means[1]).all()
    assert (means[0] == means[2]).all()


def test_launches_that_do_not_fit_are_refused(machine):
    stream = machine.stream()
    address, _ = machine.array([1.0], np.float32)
    for grid, block in ((0, 32), (1, 0), (1, 1025)):
        code = machine.code(
            lambda g=grid, b=block: machine.launch(
                stream, "scale_f32", address, address, 1, grid=g, block=b
            )
        )
        assert code == 1
