"""The exception tree: who catches whom, and messages that carry every fact."""

from __future__ import annotations

import inspect

import pytest

from trlow import errors
from trlow.errors import (
    CaptureError,
    CompileError,
    CudaError,
    ForeignError,
    NcclError,
    RankError,
    TrlowError,
    UsageError,
)

USAGE = {"SettingsError", "PlanError", "ModelError", "DataError"}
FOREIGN = {"CudaError", "NcclError", "CompileError"}


def test_the_tree_is_the_one_drawn():
    assert errors.__doc__ is not None
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert issubclass(kind, TrlowError)
        assert name in errors.__doc__
        assert issubclass(kind, ValueError) == (name in USAGE | {"UsageError"})
        assert issubclass(kind, UsageError) == (name in USAGE | {"UsageError"})
        assert issubclass(kind, ForeignError) == (name in FOREIGN | {"ForeignError"})


def test_all_names_every_exception():
    defined = {n for n, kind in inspect.getmembers(errors, inspect.isclass) if n.endswith("Error")}
    assert set(errors.__all__) == defined


def test_a_foreign_error_names_every_fact():
    error = CudaError("cudaMalloc", 2, "cudaErrorMemoryAllocation", rank=1, device=3, detail="full")
    assert str(error) == (
        "cudaMalloc failed: cudaErrorMemoryAllocation (2) on rank 1, device 3: full"
    )
    assert (error.function, error.code, error.rank) == ("cudaMalloc", 2, 1)


def test_a_foreign_error_leaves_out_what_is_unknown():
    assert str(NcclError("ncclGroupEnd", 5, "x")) == "ncclGroupEnd failed: x (5)"
    assert str(NcclError("ncclGroupEnd", 5, "x", device=0)).endswith("(5) on device 0")


def test_with_rank_gives_a_copy_of_the_same_kind():
    error = NcclError("ncclAllReduce", 5, "ncclInvalidUsage", detail="d")
    copy = error.with_rank(2, 4)
    assert type(copy) is NcclError
    assert (copy.rank, copy.device, copy.detail, copy.code) == (2, 4, "d", 5)
    assert error.rank is None
    assert "rank 2, device 4" in str(copy)


def test_with_rank_keeps_the_compilers_log():
    error = CompileError("nvrtcCompileProgram", 6, "NVRTC_ERROR_COMPILATION", log="line 1: error")
    assert error.with_rank(0, 0).log == "line 1: error"


def test_a_capture_error_names_rank_stage_and_op():
    error = CaptureError("refused", rank=0, stage="DEEP_COMM", op="all_reduce")
    assert str(error) == "refused (rank 0, stage DEEP_COMM, op all_reduce)"
    assert str(CaptureError("refused", rank=None, stage=None, op=None)) == "refused"


def test_a_rank_error_names_step_and_peers():
    error = RankError("no progress", rank=1, step=7, stage="X", peers="rank 0 waits")
    assert str(error) == "no progress (rank 1, step 7, stage X); peers: rank 0 waits"
    with pytest.raises(TrlowError, match=r"^no progress$"):
        raise RankError("no progress", rank=None, step=None, stage=None)
