"""What other array libraries make of an arena: the same memory, shape, strides and element type.

numpy is always there. torch and jax are asked where they are installed; a test without its library
is skipped and counted.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import resource
import sys
import weakref
from ctypes import c_char_p, py_object, pythonapi

import numpy as np
import pytest

import trlow
from trlow import dlpack
from trlow.dtype import BF16, DTYPES, F8E4M3, F32
from trlow.errors import PlanError, UsageError

pytestmark = pytest.mark.timeout(110)
FLOAT8 = ("float8_e4m3", "float8_e5m2")


def imported(name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: nothing was asked of its from_dlpack")
    return importlib.import_module(name)


@pytest.fixture
def torch():
    return imported("torch")


@pytest.fixture
def jax():
    return imported("jax")


def plan_of(*dtypes, shape=(2, 3, 4, 5)):
    table = trlow.RegionTable(
        "types", tuple(trlow.Region(str(dtype).upper(), dtype, "any") for dtype in dtypes), ()
    )
    builder = trlow.PlanBuilder(table)
    for dtype in dtypes:
        builder.add(str(dtype).upper(), str(dtype), shape)
    return builder.build()


@pytest.fixture
def arena(settings):
    with trlow.Runtime(settings, plan_of(*DTYPES.values())) as runtime:
        for name, dtype in DTYPES.items():
            values = (np.arange(120) % 100).astype(dtype.numpy).reshape(2, 3, 4, 5)
            runtime.arenas[1].copy_in(name, values)
        yield runtime.arenas[1]


# ------------------------------------------------------------------------------------- numpy


@pytest.mark.parametrize("name", [name for name in DTYPES if not name.startswith(("b", "float8"))])
def test_numpy_sees_the_memory_itself(arena, name):
    array = np.from_dlpack(arena.array(name))
    assert array.ctypes.data == arena.address(name)
    assert array.dtype == name
    assert (array == arena.copy_out(name)).all()
    array[1, 2, 3, 4] = 7
    assert arena.copy_out(name)[1, 2, 3, 4] == 7


@pytest.mark.parametrize("name", ["bfloat16", *FLOAT8])
def test_numpy_has_no_short_float_and_its_refusal_arrives(arena, name):
    """The capsule goes while the refusal is on its way: it must not be lost on it."""
    for _ in range(100):
        with pytest.raises((BufferError, RuntimeError), match=r"[Uu]nsupported"):
            np.from_dlpack(arena.array(name))
    assert np.asarray(arena.array(name)).dtype == DTYPES[name].numpy


def test_a_region_a_range_and_a_tensor_may_be_asked_for(arena):
    plan = arena.plan
    for what in (plan["float32"], "float32", plan.range("float32"), "FLOAT32"):
        array = np.from_dlpack(arena.array(what))
        assert array.ctypes.data == arena.address("float32")
        assert (array.ravel()[:120] == np.arange(120) % 100).all()
    assert np.from_dlpack(arena.array(plan["float32"])).shape == (2, 3, 4, 5)
    assert np.from_dlpack(arena.array(plan.range("float32"))).shape == (120,)


def test_shape_and_strides_are_kept_by_both_protocols(arena):
    layout = ((2, 5, 3, 4), (60, 1, 20, 5))  # channels last
    wanted = arena.copy_out("float32").reshape(2, 3, 4, 5).transpose(0, 3, 1, 2)
    view = arena.array("float32", *layout)
    for array in (np.from_dlpack(view), np.asarray(view)):
        assert array.strides == (240, 4, 80, 20)
        assert (array == wanted).all()
    assert np.from_dlpack(arena.array("float32", (3, 2))).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert np.from_dlpack(arena.array("float32", ())) == 0


@pytest.mark.parametrize(
    ("shape", "strides", "message"),
    [
        ((11, 11), None, "120 elements, too few"),
        ((-1, -2), None, "too few"),
        ((10, 12), (12,), "1 strides for the 2 extents"),
        ((10, 6), (12, 1), "not dense"),
        ((10, 12), (0, 1), "not dense"),
        ((10, 12), (-12, 1), "not dense"),
        ((10, 12), (1, 1), "not dense"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(arena, shape, strides, message):
    with pytest.raises(UsageError, match=message):
        arena.array("float32", shape, strides)


def test_the_strides_of_one_element_do_not_matter(arena):
    assert np.from_dlpack(arena.array("float32", (1, 120, 1), (7, 1, -3))).shape == (1, 120, 1)


def test_a_range_of_another_plan_is_refused(arena):
    with pytest.raises(PlanError, match="of this plan ends at"):
        arena.array(trlow.Range(1 << 20, 4, F32, "far", "away"))


# ---------------------------------------------------------------------------------- protocol


def name_of(capsule):
    function = pythonapi.PyCapsule_GetName
    function.restype, function.argtypes = c_char_p, (py_object,)
    return function(capsule)


def test_the_version_is_the_one_that_the_consumer_knows(arena):
    view = arena.array("float32")
    assert name_of(view.__dlpack__()) == b"dltensor"
    assert name_of(view.__dlpack__(max_version=(0, 8))) == b"dltensor"
    assert name_of(view.__dlpack__(max_version=(1, 0))) == b"dltensor_versioned"
    assert name_of(view.__dlpack__(max_version=(2, 1))) == b"dltensor_versioned"


@pytest.mark.parametrize("max_version", [None, (1, 0)])
@pytest.mark.parametrize("dtype", [BF16, F8E4M3, F32], ids=str)
@pytest.mark.parametrize("device", [(dlpack.CUDA, 3), (dlpack.CPU, 0)], ids=str)
def test_the_capsule_says_device_type_shape_and_strides(max_version, dtype, device):
    """Of memory on CUDA, too: what describes it never reads it."""
    view = dlpack.DeviceArray(1 << 40, (3, 4), (1, 3), dtype, device, lambda: None)
    capsule = view.__dlpack__(max_version=max_version)
    skipped = 0 if max_version is None else dlpack.BEHIND_VERSION
    tensor = dlpack._Tensor.from_address(dlpack._pointer_of(capsule, name_of(capsule)) + skipped)
    assert (tensor.data, tensor.ndim) == (1 << 40, 2)
    assert (tensor.device_type, tensor.device_id) == device == view.__dlpack_device__()
    assert tensor.code == {"bfloat16": 4, "float8_e4m3": 10, "float32": 2}[dtype.name]
    assert (tensor.bits, tensor.lanes) == (8 * dtype.itemsize, 1)
    on_cuda = device[0] == dlpack.CUDA
    assert hasattr(view, "__cuda_array_interface__") == on_cuda
    assert hasattr(view, "__array_interface__") != on_cuda


@pytest.mark.parametrize("stream", [None, -1, 1, 2, 1 << 40])
def test_any_stream_of_cuda_will_do(stream):
    device = (dlpack.CUDA, 0)
    dlpack.DeviceArray(64, (1,), None, F32, device, lambda: None).__dlpack__(stream=stream)


@pytest.mark.parametrize(
    ("device", "stream"),
    [(dlpack.CUDA, 0), (dlpack.CUDA, -2), (dlpack.CUDA, "1"), (dlpack.CUDA, True), (dlpack.CPU, 1)],
)
def test_what_is_no_stream_is_refused(device, stream):
    view = dlpack.DeviceArray(64, (1,), None, F32, (device, 0), lambda: None)
    with pytest.raises(UsageError, match="stream="):
        view.__dlpack__(stream=stream)


def test_another_device_and_a_copy_are_refused_as_the_protocol_says(arena):
    view = arena.array("float32")
    with pytest.raises(BufferError, match="copy=True"):
        np.from_dlpack(view, copy=True)
    with pytest.raises(BufferError, match="asked for"):
        view.__dlpack__(dl_device=(dlpack.CUDA, 0))
    assert view.__dlpack__(dl_device=(dlpack.CPU, 0), copy=False)


# ---------------------------------------------------------------------------------- lifetime


def test_nothing_is_handed_out_once_closed(settings, small):
    with trlow.Runtime(settings, small.plan) as runtime:
        arena = runtime.arenas[0]
        view = arena.array("late")
    with pytest.raises(UsageError, match="the runtime is closed"):
        np.from_dlpack(view)
    with pytest.raises(UsageError, match="the arena is closed"):
        arena.array("late")


def test_while_ranks_run_a_rank_is_given_its_own_memory_alone(runtime):
    def export(rank):
        own, others = (runtime.arenas[(rank.index + n) % 4].array("late") for n in (0, 1))
        with pytest.raises(UsageError, match="called on a rank's own thread"):
            np.from_dlpack(others)
        return np.from_dlpack(own)[0]

    assert runtime.together(export) == [0, 10, 20, 30]


def test_a_capsule_keeps_no_runtime_alive(settings, small):
    """A runtime that was forgotten is to be noticed, whoever has seen its memory."""
    runtime = trlow.Runtime(settings, small.plan)
    capsule = runtime.arenas[0].array("late").__dlpack__()
    array = np.from_dlpack(runtime.arenas[0].array("late"))
    runtime.close()
    gone = weakref.ref(runtime)
    del runtime
    gc.collect()
    assert gone() is None
    assert capsule is not None
    assert array is not None


@pytest.mark.parametrize("max_version", [None, (1, 0)])
@pytest.mark.parametrize("consumed", [True, False], ids=["consumed", "not consumed"])
def test_a_description_goes_with_its_capsule_or_its_consumer(
    arena, monkeypatch, consumed, max_version
):
    """The deleter lets go of it: once, or the reference that is counted here would be missing."""
    described = []

    class Counted(dlpack._Described):
        def __init__(self, interface):
            super().__init__(interface)
            described.append(weakref.ref(self))

    class Consumer:
        def __init__(self, view):
            self.capsule = view.__dlpack__(max_version=max_version)

        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **_):
            return self.capsule

    monkeypatch.setattr(dlpack, "_Described", Counted)
    kept = Consumer(arena.array("float32"))
    witness = described[0]()
    before = sys.getrefcount(witness)
    array = np.from_dlpack(kept) if consumed else None
    del kept
    if consumed:
        assert sys.getrefcount(witness) == before
    del array
    assert sys.getrefcount(witness) == before - 1
    del witness
    assert described[0]() is None


@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_ten_thousand_exports_take_no_memory(arena, max_version):
    view = arena.array("float32")
    refused = arena.array("bfloat16")

    def export(times):
        for _ in range(times):
            view.__dlpack__(max_version=max_version)
            np.from_dlpack(view)
            with contextlib.suppress(BufferError, RuntimeError):
                np.from_dlpack(refused)

    export(1_000)
    gc.collect()
    objects, before = len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    export(10_000)
    gc.collect()
    assert len(gc.get_objects()) - objects < 100
    # 10,000 descriptions of at least 100 bytes each would be 1,000 KiB, in each of three ways.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500


# ----------------------------------------------------------------------------- other libraries


@pytest.mark.parametrize("name", [name for name in DTYPES if name not in FLOAT8])
def test_torch_sees_the_memory_itself(arena, torch, name):
    tensor = torch.from_dlpack(arena.array(name, (2, 5, 3, 4), (60, 1, 20, 5)))
    assert tensor.data_ptr() == arena.address(name)
    assert tensor.dtype == getattr(torch, name)
    assert tensor.is_contiguous(memory_format=torch.channels_last)
    carried = tensor.permute(0, 2, 3, 1).view(getattr(torch, DTYPES[name].numpy.name)).numpy()
    assert (carried == arena.copy_out(name)).all()
    tensor.zero_()
    assert not arena.copy_out(name).any()


@pytest.mark.parametrize("name", FLOAT8)
def test_torch_knows_float8(arena, torch, name):
    wanted = {"float8_e4m3": "float8_e4m3fn", "float8_e5m2": "float8_e5m2"}[name]
    tensor = torch.from_dlpack(arena.array(name))
    assert tensor.dtype == getattr(torch, wanted)
    assert (tensor.view(torch.uint8).numpy() == arena.copy_out(name)).all()


def test_a_tensor_and_its_gradient_may_go_after_the_runtime(settings, small, torch):
    with trlow.Runtime(settings, small.plan) as runtime:
        runtime.arenas[0].copy_in("late", np.ones(24, np.float32))
        tensor = torch.from_dlpack(runtime.arenas[0].array("late"))
        assert float(tensor.sum()) == 24
    del runtime
    gc.collect()
    del tensor  # nothing of it is read, and nothing freed twice


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int32"])
def test_jax_sees_the_memory_itself(arena, jax, name):
    array = jax.dlpack.from_dlpack(arena.array(name))
    assert array.unsafe_buffer_pointer() == arena.address(name)
    assert str(array.dtype) == name
    values = np.asarray(array).view(DTYPES[name].numpy)
    assert (values == arena.copy_out(name)).all()
