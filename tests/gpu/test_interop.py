"""Other array libraries on the memory of an arena, and what others lend to a runtime, on GPUs.

Every library is asked in a fresh process: each keeps memory, threads and warnings of its own.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from ctypes import byref, c_int, c_void_p
from pathlib import Path

import numpy as np
import pytest

import trlow
from trlow.device import NON_BLOCKING, Platform
from trlow.errors import RankError, UsageError
from trlow.interop import StreamHandle
from trlow.program import Stream

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(110)]
ROOT = str(Path(trlow.__file__).parents[1])

PROGRAM = """
import faulthandler, os, sys
faulthandler.dump_traceback_later(100, exit=True)
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
sys.path.insert(0, {root!r})
import numpy as np
import trlow
from trlow.dtype import BF16, F16, F32, I32
dtypes = (F32, F16, I32, BF16)
table = trlow.RegionTable(
    "types", tuple(trlow.Region(str(t).upper(), t, "any") for t in dtypes), ())
builder = trlow.PlanBuilder(table)
for dtype in dtypes:
    builder.add(str(dtype).upper(), str(dtype), (2, 3, 4, 5))
plan = builder.build()
settings = trlow.Settings(
    device={device!r}, gpus={gpus!r}, any_world_size=True, deadline_s=20.0, host_devices=4)
{library}
with trlow.Runtime(settings, plan) as runtime:
    for rank, arena in enumerate(runtime.arenas):
        for dtype in dtypes:
            name, carrier = str(dtype), dtype.numpy
            values = (np.arange(120) + rank).astype(carrier).reshape(2, 3, 4, 5)
            arena.copy_in(name, values)
            if not knows(name):
                continue
            array = imported(arena.array(name))
            assert address(array) == arena.address(name), (name, "was copied")
            assert type_of(array) == name, type_of(array)
            assert (host(array).view(carrier) == values).all(), name
            if not writes:
                continue
            strided = imported(arena.array(name, (2, 5, 3, 4), (60, 1, 20, 5)))
            assert address(strided) == arena.address(name)
            assert (host(strided).view(carrier) == values.transpose(0, 3, 1, 2)).all(), name
            fill(strided)
            assert (arena.copy_out(name) == host(array).view(carrier)).all(), name
            assert (arena.copy_out(name) != values).any(), name
    del array
print("ended")
"""

TORCH = """
import torch
on_gpu = {device!r} == "cuda"
# Each import on a stream of its own: what was written must be there for any of them.
def imported(view):
    if not on_gpu:
        return torch.from_dlpack(view)
    index = view.__dlpack_device__()[1]
    with torch.cuda.stream(torch.cuda.Stream(index)):
        tensor = torch.from_dlpack(view)
        assert tensor.device == torch.device("cuda", index)
        return tensor
def address(tensor): return tensor.data_ptr()
def type_of(tensor): return str(tensor.dtype).removeprefix("torch.")
def host(tensor):
    bits = tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor
    return bits.cpu().numpy()
def fill(tensor):
    tensor.fill_(7)
    if on_gpu:
        torch.cuda.synchronize(tensor.device)
def knows(name): return True
writes = True
"""

CUPY = """
import cupy
def imported(view):
    with cupy.cuda.Device(view.__dlpack_device__()[1]), cupy.cuda.Stream(non_blocking=True):
        array = cupy.from_dlpack(view)
        assert array.device.id == view.__dlpack_device__()[1]
        return array
def address(array): return array.data.ptr
def type_of(array): return str(array.dtype)
def host(array):
    with array.device:
        return array.get()
def fill(array):
    with array.device:
        array.fill(7)
        cupy.cuda.Device().synchronize()
def knows(name): return name != "bfloat16"  # numpy has none, so most of cupy neither
writes = True
"""

JAX = """
import jax
def imported(view): return jax.dlpack.from_dlpack(view)
def address(array): return array.unsafe_buffer_pointer()
def type_of(array): return str(array.dtype)
def host(array): return np.asarray(array)
def knows(name): return True
writes = False  # arrays of jax are never changed, and are row-major
"""

LIBRARIES = {"torch": TORCH, "cupy": CUPY, "jax": JAX}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.gpu(2))])
@pytest.mark.parametrize("library", LIBRARIES)
def test_from_dlpack_gives_the_memory_itself(device, library, ranks):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: nothing was asked of its from_dlpack")
    if library == "cupy" and device == "host":
        pytest.skip("cupy takes no host memory")
    gpus = "0" if ranks == 1 else f"0-{ranks - 1}"
    text = PROGRAM.format(
        root=ROOT, device=device, gpus=gpus, library=LIBRARIES[library].format(device=device)
    )
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=105, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("ended\n"), (done.stdout, done.stderr)


@pytest.fixture
def platform(gpu_settings):
    return Platform.open(gpu_settings(1))


def streams(platform, count):
    """One of each device; the test destroys them."""
    made = []
    for ordinal in range(count):
        handle = c_void_p()
        with platform.on(ordinal):
            platform.cudart.cudaStreamCreateWithFlags(byref(handle), NON_BLOCKING)
        made.append(handle.value)
    return made


def doubled(runtime, small):
    """Run a step whose callback writes on COMP_1; whether every arena has it afterwards."""
    cudart = runtime.platform.cudart

    def callback(rank, stream):
        address = runtime.arenas[rank].address("feature")
        cudart.cudaMemsetAsync(address, 0x40, 24, stream)

    feature = small.plan.range("feature")
    stage = trlow.Stage(
        "WORK", Stream.COMP_1, external=trlow.External("callback", (), (feature,), callback)
    )
    program = trlow.Program.single("work", (stage, *small.mean_program().phases[0]))
    replay = runtime.capture(program)
    for arena in runtime.arenas:
        arena.copy_in("feature", np.zeros(6, np.float32))
    replay.run(3)
    wanted = np.full(24, 0x40, np.uint8).view(np.float32)
    return all((arena.copy_out("feature") == wanted).all() for arena in runtime.arenas)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.gpu(2))])
@pytest.mark.parametrize("key", [Stream.COMP_1, Stream.UPDATE], ids=str)
def test_lent_streams_are_used_and_left_alone(gpu_settings, small, platform, ranks, key):
    given = streams(platform, ranks)
    lent = [StreamHandle(handle) for handle in given]
    with trlow.Runtime(gpu_settings(ranks), small.plan, streams={key: lent}) as runtime:
        used = runtime.together(lambda rank: rank.streams.object(key).handle)
        assert used == given
        assert doubled(runtime, small)
    for handle in given:
        platform.cudart.cudaStreamSynchronize(handle)
        platform.cudart.cudaStreamDestroy(handle)


def test_a_lent_stream_that_blocks_is_refused(gpu_settings, small, platform):
    handle = c_void_p()
    with platform.on(0):
        platform.cudart.cudaStreamCreateWithFlags(byref(handle), 0)
    lent = {Stream.COMP_1: [handle.value]}
    with pytest.raises(UsageError, match="orders itself with the legacy"):
        trlow.Runtime(gpu_settings(1), small.plan, streams=lent)
    platform.cudart.cudaStreamDestroy(handle)


@pytest.fixture
def communicators(platform):
    """Those of two GPUs; a test whose runtime aborts them empties the list."""
    handles = (c_void_p * 2)()
    with platform.on(0):
        platform.nccl.ncclCommInitAll(handles, 2, (c_int * 2)(0, 1))
    made = list(handles)
    yield made
    for handle in made:
        platform.nccl.ncclCommDestroy(handle)


@pytest.mark.gpu(2)
def test_lent_communicators_are_used_and_left_alone(gpu_settings, small, communicators):
    for _ in range(2):
        with trlow.Runtime(gpu_settings(2), small.plan, communicators=communicators) as runtime:
            assert doubled(runtime, small)


@pytest.mark.gpu(2)
def test_communicators_of_other_ranks_are_refused(gpu_settings, small, communicators):
    with pytest.raises(UsageError, match="rank 0 has 1 as its rank"):
        trlow.Runtime(gpu_settings(2), small.plan, communicators=communicators[::-1])


@pytest.mark.gpu(2)
def test_a_rank_that_fails_costs_lent_communicators_and_that_is_said(
    gpu_settings, small, communicators
):
    def fill(rank, step, slot):
        if rank == 1 and step == 2:
            message = "no more data"
            raise OSError(message)

    given = tuple(communicators)
    with trlow.Runtime(gpu_settings(2), small.plan, communicators=given) as runtime:
        replay = runtime.capture(small.feed_program())
        communicators.clear()  # they are gone from here on
        with pytest.raises(RankError, match="no more data") as caught:
            replay.run(5, fill)
        assert any("were given to the runtime were aborted" in n for n in caught.value.__notes__)
        with pytest.raises(UsageError, match="aborted after a failure; close this runtime"):
            runtime.capture(small.mean_program())
