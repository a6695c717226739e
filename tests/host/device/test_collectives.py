"""What collectives compute, against numpy."""

from __future__ import annotations

from ctypes import byref, c_double, c_float, c_int, c_void_p

import numpy as np
import pytest

pytestmark = pytest.mark.timeout(60)

RANKS = 4
SUM, PROD, MAX, MIN, AVG = range(5)
NUMPY = {
    0: np.int8, 1: np.uint8, 2: np.int32, 3: np.uint32, 4: np.int64, 5: np.uint64,
    6: np.float16, 7: np.float32, 8: np.float64,
}  # fmt: skip
BFLOAT16, E4M3, E5M2 = 9, 10, 11


@pytest.fixture
def ranks(machine):
    """(communicators, streams) of four ranks."""
    return machine.comms(RANKS), [machine.stream(rank) for rank in range(RANKS)]


def all_reduce(machine, ranks, inputs, dtype, op):
    """Every rank's result; in place on even ranks, out of place on odd ones."""
    comms, streams = ranks
    results = []
    machine.nccl.ncclGroupStart()
    for rank, values in enumerate(inputs):
        address, view = machine.array(values, values.dtype, rank)
        target, result = address, view
        if rank % 2:
            target, result = machine.array(np.zeros_like(values), values.dtype, rank)
        machine.nccl.ncclAllReduce(
            address, target, values.size, dtype, op, comms[rank], streams[rank]
        )
        results.append(result)
    machine.nccl.ncclGroupEnd()
    machine.sync(*streams)
    return results


def reference(inputs, op):
    """In rank order; 16-bit floats widened, rounded once. Integers wrap."""
    kind = inputs[0].dtype
    wide = np.float32 if kind == np.float16 else kind
    values = [one.astype(wide) for one in inputs]
    if op == AVG and kind.kind == "f":
        share = np.asarray(1 / len(inputs), kind)
        values = [(one * share).astype(wide) for one in inputs]
    total = values[0]
    for one in values[1:]:
        combine = {SUM: np.add, AVG: np.add, PROD: np.multiply, MAX: np.fmax, MIN: np.fmin}[op]
        total = combine(total, one, dtype=wide)
    if op == AVG and kind.kind != "f":
        total = np.trunc(total.astype(np.longdouble) / len(inputs))
    return total.astype(kind)


@pytest.mark.parametrize("op", [SUM, PROD, MAX, MIN, AVG])
@pytest.mark.parametrize("dtype", NUMPY)
def test_all_reduce_of_every_type_and_operation(machine, ranks, dtype, op):
    random = np.random.default_rng(dtype * 10 + op)
    kind = np.dtype(NUMPY[dtype])
    for count in (1, 7, 5000):
        if kind.kind == "f":
            inputs = [random.standard_normal(count).astype(kind) for _ in range(RANKS)]
        else:
            info = np.iinfo(kind)
            inputs = [
                random.integers(info.min, info.max, count, kind, endpoint=True)
                for _ in range(RANKS)
            ]
        with np.errstate(over="ignore"):
            expected = reference(inputs, op)
        for result in all_reduce(machine, ranks, inputs, dtype, op):
            assert result.tobytes() == expected.tobytes()


def to_bfloat16(values):
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_bfloat16_is_summed_in_float_and_rounded_once(machine, ranks):
    random = np.random.default_rng(1)
    inputs = [to_bfloat16(random.standard_normal(999)) for _ in range(RANKS)]
    wide = [from_bfloat16(one) for one in inputs]
    expected = to_bfloat16(((wide[0] + wide[1]) + wide[2]) + wide[3])
    for result in all_reduce(machine, ranks, inputs, BFLOAT16, SUM):
        assert (result == expected).all()


def test_nan_survives_a_sum_and_vanishes_in_a_max(machine, ranks):
    inputs = [np.array([rank, rank], np.float32) for rank in range(RANKS)]
    inputs[2][0] = np.nan
    assert np.isnan(all_reduce(machine, ranks, inputs, 7, SUM)[0][0])
    assert list(all_reduce(machine, ranks, inputs, 7, MAX)[0]) == [3, 3]


def fp8_values(exponent_bits, mantissa_bits, infinities):
    """The float of each of the 128 non-negative patterns of an fp8 type."""
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for pattern in range(128):
        exponent, mantissa = pattern >> mantissa_bits, pattern & (2**mantissa_bits - 1)
        special = exponent == 2**exponent_bits - 1
        if special and infinities:
            values.append(np.inf if mantissa == 0 else np.nan)
        elif pattern == 127:
            values.append(np.nan)
        elif exponent == 0:
            values.append(mantissa * 2.0 ** (1 - bias - mantissa_bits))
        else:
            values.append((1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias))
    return np.array(values)


@pytest.mark.parametrize(
    ("dtype", "shape"), [(E4M3, (4, 3, False)), (E5M2, (5, 2, True))], ids=["e4m3", "e5m2"]
)
def test_fp8_keeps_every_value_rounds_to_nearest_even_and_saturates(machine, ranks, dtype, shape):
    values = fp8_values(*shape)
    patterns = np.arange(256, dtype=np.uint8)
    nothing = np.zeros(256, np.uint8)
    kept = all_reduce(machine, ranks, [patterns, nothing, nothing, nothing], dtype, SUM)[0]
    finite = np.isfinite(values)
    assert (kept[:128][finite] == patterns[:128][finite]).all()
    assert (kept[128:][finite] == np.where(patterns[:128] == 0, 0, patterns[128:])[finite]).all()
    left, right = np.divmod(np.arange(128 * 128), 128)
    inputs = [left.astype(np.uint8), right.astype(np.uint8)]
    inputs += [np.zeros(128 * 128, np.uint8)] * 2
    result = all_reduce(machine, ranks, inputs, dtype, SUM)[0]
    numbers = np.flatnonzero(finite)
    largest = values[finite].max()
    for index in np.flatnonzero(finite[left] & finite[right]):
        total = values[left[index]] + values[right[index]]
        if total >= largest:
            assert values[result[index]] == largest
            continue
        distance = np.abs(values[numbers] - total)
        nearest = numbers[distance == distance.min()]
        expected = nearest[0] if nearest.size == 1 else nearest[nearest % 2 == 0][0]
        assert result[index] == expected


@pytest.mark.parametrize("in_place", [False, True])
def test_the_other_collectives(machine, ranks, in_place):
    comms, streams = ranks
    count = 3000
    random = np.random.default_rng(3)
    data = [random.integers(-99, 99, RANKS * count).astype(np.float32) for _ in range(RANKS)]

    def run(call, send_count, recv_count, send_at, recv_at):
        """Both buffers in one allocation when in place; the result of every rank."""
        results = []
        for rank in range(RANKS):
            size = max(send_count, recv_count)
            send, view = machine.array(data[rank][:size], np.float32, rank)
            offset = send_at(rank) * 4 if in_place else 0
            recv = send + (recv_at(rank) * 4 if in_place else 0)
            result = view[recv_at(rank) : recv_at(rank) + recv_count]
            if not in_place:
                recv, result = machine.array(np.zeros(recv_count), np.float32, rank)
            source = data[rank][send_at(rank) if in_place else 0 :][:send_count].copy()
            call(rank, send + offset, recv)
            results.append((source, result))
        machine.sync(*streams)
        return [source for source, _ in results], [result for _, result in results]

    nccl, zero = machine.nccl, lambda rank: 0
    sent, got = run(
        lambda r, s, t: nccl.ncclBroadcast(s, t, count, 7, 2, comms[r], streams[r]),
        count, count, zero, zero,
    )  # fmt: skip
    assert all((one == sent[2]).all() for one in got)
    sent, got = run(
        lambda r, s, t: nccl.ncclReduce(s, t, count, 7, SUM, 1, comms[r], streams[r]),
        count, count, zero, zero,
    )  # fmt: skip
    assert (got[1] == sum(sent)).all()
    assert (got[0] == (sent[0] if in_place else 0)).all()  # others are left alone
    sent, got = run(
        lambda r, s, t: nccl.ncclAllGather(s, t, count, 7, comms[r], streams[r]),
        count, RANKS * count, lambda r: r * count, zero,
    )  # fmt: skip
    assert all((one == np.concatenate(sent)).all() for one in got)
    sent, got = run(
        lambda r, s, t: nccl.ncclReduceScatter(s, t, count, 7, SUM, comms[r], streams[r]),
        RANKS * count, count, zero, lambda r: r * count,
    )  # fmt: skip
    for rank in range(RANKS):
        assert (got[rank] == sum(sent)[rank * count : (rank + 1) * count]).all()


def test_send_and_receive_around_a_ring(machine, ranks):
    comms, streams = ranks
    arrays = [machine.array([rank, -1], np.float32, rank) for rank in range(RANKS)]
    machine.nccl.ncclGroupStart()
    for rank, (address, _) in enumerate(arrays):
        machine.nccl.ncclSend(address, 1, 7, (rank + 1) % RANKS, comms[rank], streams[rank])
        machine.nccl.ncclRecv(address + 4, 1, 7, (rank - 1) % RANKS, comms[rank], streams[rank])
    machine.nccl.ncclGroupEnd()
    machine.sync(*streams)
    assert [view[1] for _, view in arrays] == [3, 0, 1, 2]


def test_a_premultiplied_sum_takes_each_ranks_own_factor(machine, ranks):
    comms, streams = ranks
    arrays = [machine.array([rank + 1.0], np.float32, rank) for rank in range(RANKS)]
    on_device, factor_view = machine.array([99.0], np.float32, 0)
    ops = []
    for rank, comm in enumerate(comms):
        op = c_int()
        scalar = on_device if rank == 0 else byref(c_float(10.0**rank))
        machine.nccl.ncclRedOpCreatePreMulSum(byref(op), scalar, 7, 0 if rank == 0 else 1, comm)
        ops.append(op.value)
    factor_view[0] = 0.5  # device residence: read when the collective runs
    for rank in range(RANKS):
        machine.all_reduce(rank, arrays[rank][0], 1, comms, streams, op=ops[rank])
    machine.sync(*streams)
    assert all(view[0] == 0.5 + 20 + 300 + 4000 for _, view in arrays)
    wrong_type = machine.code(machine.all_reduce, 0, arrays[0][0], 1, comms, streams, 3, ops[0])
    assert wrong_type == 4
    machine.nccl.ncclRedOpDestroy(ops[0], comms[0])
    assert machine.code(machine.all_reduce, 0, arrays[0][0], 1, comms, streams, 7, ops[0]) == 4


def test_captured_collectives_are_kernel_nodes_and_replay(machine, ranks):
    comms, streams = ranks
    arrays = [machine.array([1.0], np.float32, rank) for rank in range(RANKS)]
    for stream in streams:
        machine.cudart.cudaStreamBeginCapture(stream, 1)
    machine.nccl.ncclGroupStart()
    for rank in range(RANKS):
        machine.all_reduce(rank, arrays[rank][0], 1, comms, streams)
        machine.all_reduce(rank, arrays[rank][0], 1, comms, streams)
    machine.nccl.ncclGroupEnd()
    graphs = [machine.end_capture(stream) for stream in streams]
    execs = [machine.instantiate(graph) for graph in graphs]
    assert machine.nodes(graphs[0]) == [0, 0]
    assert arrays[0][1][0] == 1
    for expected in (16, 256):
        for rank in range(RANKS):
            machine.replay(execs[rank], streams[rank], rank)
        machine.sync(*streams)
        assert all(view[0] == expected for _, view in arrays)
    machine.all_reduce(0, arrays[0][0], 1, comms, streams)  # eager ones go on counting with them
    for rank in range(1, RANKS):
        machine.all_reduce(rank, arrays[rank][0], 1, comms, streams)
    machine.sync(*streams)
    assert all(view[0] == 1024 for _, view in arrays)


def test_communicators_by_unique_id_and_by_split(machine):
    from trlow.binding import nccl as nccl_binding

    unique = nccl_binding.UniqueId()
    machine.nccl.ncclGetUniqueId(byref(unique))
    handles = [c_void_p() for _ in range(RANKS)]
    machine.nccl.ncclGroupStart()
    for rank, handle in enumerate(handles):
        with machine.on(rank):
            machine.nccl.ncclCommInitRank(byref(handle), RANKS, unique, rank)
    machine.nccl.ncclGroupEnd()
    comms = [machine._made(machine.nccl.ncclCommDestroy, handle.value) for handle in handles]
    parts = [c_void_p(1) for _ in range(RANKS)]
    machine.nccl.ncclGroupStart()
    for rank, part in enumerate(parts):
        color = -1 if rank == 3 else rank % 2
        machine.nccl.ncclCommSplit(comms[rank], color, -rank, byref(part), None)
    machine.nccl.ncclGroupEnd()
    assert parts[3].value is None
    described = []
    for part in parts[:3]:
        machine._made(machine.nccl.ncclCommDestroy, part.value)
        count, rank, device = c_int(), c_int(), c_int()
        machine.nccl.ncclCommCount(part, byref(count))
        machine.nccl.ncclCommUserRank(part, byref(rank))
        machine.nccl.ncclCommCuDevice(part, byref(device))
        described.append((count.value, rank.value, device.value))
    assert described == [(2, 1, 0), (1, 0, 1), (2, 0, 2)]


def test_float64_average_of_three_ranks(machine):
    comms = machine.comms(3)
    streams = [machine.stream(rank) for rank in range(3)]
    arrays = [machine.array([0.1 * rank + 0.7], np.float64, rank) for rank in range(3)]
    values = [view[0] for _, view in arrays]
    for rank in range(3):
        machine.all_reduce(rank, arrays[rank][0], 1, comms, streams, 8, AVG)
    machine.sync(*streams)
    third = c_double(1 / 3).value
    expected = (values[0] * third + values[1] * third) + values[2] * third
    assert all(view[0] == expected for _, view in arrays)
