"""Memory of an arena as torch tensors: both sides see what the other writes."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="no torch here: trlow.torch is not tested at all")

import torch_cases as cases  # noqa: E402

import trlow  # noqa: E402
from trlow.dtype import BF16, F16, F32, I32  # noqa: E402
from trlow.errors import PlanError  # noqa: E402
from trlow.torch import tensor_of  # noqa: E402

pytestmark = pytest.mark.timeout(60)
TABLE = trlow.RegionTable(
    "views",
    tuple(trlow.Region(f"R_{d.name}", d, "of one type") for d in (F32, F16, BF16, I32)),
    (),
)


@pytest.fixture
def arena():
    builder = trlow.PlanBuilder(TABLE)
    builder.add("R_float32", "matrix", (3, 4))
    builder.add("R_float32", "vector", (5,))
    builder.add("R_float16", "half", (6,))
    builder.add("R_bfloat16", "brain", (6,))
    builder.add("R_int32", "count", (2,))
    with trlow.Runtime(cases.host(1), builder.build()) as runtime:
        yield runtime.arenas[0]


def test_what_torch_writes_the_arena_holds_and_the_other_way_round(arena):
    view = tensor_of(arena, "matrix")
    assert (view.shape, view.dtype, view.device.type) == ((3, 4), torch.float32, "cpu")
    view.copy_(torch.arange(12.0).view(3, 4))
    assert np.array_equal(arena.copy_out("matrix"), np.arange(12.0).reshape(3, 4))
    arena.copy_in("matrix", np.full((3, 4), 7, np.float32))
    assert torch.equal(view, torch.full((3, 4), 7.0))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("half", torch.float16), ("brain", torch.bfloat16), ("count", torch.int32)],
)
def test_a_view_has_the_type_of_its_region(arena, name, dtype):
    view = tensor_of(arena, name)
    assert view.dtype is dtype
    view.fill_(3)
    assert torch.equal(tensor_of(arena, name), torch.full_like(view, 3))


def test_two_views_are_the_same_memory_and_a_range_holds_its_tensors(arena):
    matrix, vector = tensor_of(arena, "matrix"), tensor_of(arena, "vector")
    assert tensor_of(arena, "matrix").data_ptr() == matrix.data_ptr()
    whole = tensor_of(arena, "R_float32")
    assert whole.dim() == 1
    matrix.fill_(1)
    vector.fill_(2)
    assert (int((whole == 1).sum()), int((whole == 2).sum())) == (12, 5)
    offset = (vector.data_ptr() - whole.data_ptr()) // 4
    assert torch.equal(whole[offset : offset + 5], vector)


def test_an_unknown_name_is_refused(arena):
    with pytest.raises(PlanError, match="nothing"):
        tensor_of(arena, "nothing")


def test_weights_of_a_compiled_module_lie_in_its_arena():
    from trlow.torch import StaticDataParallel

    with StaticDataParallel(
        cases.mlp, cases.cross_entropy, cases.host(2), optimizer=cases.sgd
    ) as static:
        static.compile(cases.batches(1)[0])
        static.step(cases.batches(1)[0])
        for module, arena in zip(static.modules(), static._captured.runtime.arenas, strict=True):
            for name, parameter in module.named_parameters():
                view = tensor_of(arena, f"W:{name}")
                assert view.data_ptr() == parameter.data_ptr()
                assert torch.equal(view, parameter.detach().flatten())
