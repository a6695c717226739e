"""Every exception that trlow raises.

    TrlowError
    |-- UsageError (also ValueError)   what was asked cannot be; exit code 2
    |   |-- SettingsError
    |   |-- PlanError
    |   |-- ModelError
    |   `-- DataError
    |-- LibraryError                   a library or symbol is missing or too old
    |-- ForeignError                   a C call failed
    |   |-- CudaError
    |   |-- NcclError
    |   `-- CompileError               carries the compiler's log
    |-- CaptureError                   names rank, stage, op
    |-- RankError                      a rank failed or did not arrive in time
    `-- CheckpointError

A message says what failed, with which numbers, and what to do. What a program may want to decide by
is an attribute beside the message, never only inside it.
"""

from __future__ import annotations

from typing import Self

__all__ = [
    "CaptureError",
    "CheckpointError",
    "CompileError",
    "CudaError",
    "DataError",
    "ForeignError",
    "LibraryError",
    "ModelError",
    "NcclError",
    "PlanError",
    "RankError",
    "SettingsError",
    "TrlowError",
    "UsageError",
]


class TrlowError(Exception):
    """The root: catching it catches everything that trlow raises on purpose."""


class UsageError(TrlowError, ValueError):
    """What was asked cannot be. Nothing was allocated; change the request."""


class SettingsError(UsageError):
    """A setting has a value that cannot be used."""


class PlanError(UsageError):
    """A table, plan, range, range operation or program does not fit together."""


class ModelError(UsageError):
    """A layer is unknown or the shapes of two layers do not fit."""


class DataError(UsageError):
    """A data set is missing, truncated or holds values out of range."""


class LibraryError(TrlowError):
    """A shared library or one of its symbols is missing or too old."""


class ForeignError(TrlowError):
    """A C call returned a failure code.

    `function` is the C name, `code` the value returned, `name` the code's name as the library
    spells it (whatever text the caller has for an unknown code). `rank` and `device` are None where
    the caller does not know them yet; `with_rank` adds them.
    """

    def __init__(
        self,
        function: str,
        code: int,
        name: str,
        *,
        rank: int | None = None,
        device: int | None = None,
        detail: str = "",
    ) -> None:
        """Build the message from the facts, and keep the facts."""
        self.function = function
        self.code = code
        self.name = name
        self.rank = rank
        self.device = device
        self.detail = detail
        where = _listed(("rank", rank), ("device", device))
        super().__init__(
            f"{function} failed: {name} ({code})"
            + (f" on {where}" if where else "")
            + (f": {detail}" if detail else "")
        )

    def with_rank(self, rank: int | None, device: int | None) -> Self:
        """Return a copy that names the rank and device; the original is unchanged."""
        return type(self)(
            self.function, self.code, self.name, rank=rank, device=device, detail=self.detail
        )


class CudaError(ForeignError):
    """A call of the CUDA runtime or driver failed."""


class NcclError(ForeignError):
    """A call of NCCL failed; `detail` holds ncclGetLastError, which may speak of an older one."""


class CompileError(ForeignError):
    """A kernel did not compile; `log` is the compiler's output."""

    def __init__(
        self,
        function: str,
        code: int,
        name: str,
        *,
        rank: int | None = None,
        device: int | None = None,
        detail: str = "",
        log: str = "",
    ) -> None:
        """As ForeignError, with the compiler's log."""
        super().__init__(function, code, name, rank=rank, device=device, detail=detail)
        self.log = log

    def with_rank(self, rank: int | None, device: int | None) -> Self:
        """Return a copy that names the rank and device and keeps the log."""
        copy = super().with_rank(rank, device)
        copy.log = self.log
        return copy


class CaptureError(TrlowError):
    """A coordinated capture failed; every begun capture was ended before this was raised."""

    def __init__(
        self, message: str, *, rank: int | None, stage: str | None, op: str | None
    ) -> None:
        """`op` is the kernel or collective that was being enqueued, None outside of one."""
        self.message = message
        self.rank = rank
        self.stage = stage
        self.op = op
        super().__init__(_with_facts(message, ("rank", rank), ("stage", stage), ("op", op)))


class RankError(TrlowError):
    """A rank failed or did not arrive within the deadline."""

    def __init__(
        self,
        message: str,
        *,
        rank: int | None,
        step: int | None,
        stage: str | None,
        peers: str = "",
        report: str = "",
    ) -> None:
        """`peers` says in words what the other ranks were doing, `report` in lines of a table."""
        self.message = message
        self.rank = rank
        self.step = step
        self.stage = stage
        self.peers = peers
        self.report = report
        text = _with_facts(message, ("rank", rank), ("step", step), ("stage", stage))
        super().__init__(f"{text}; peers: {peers}" if peers else text)


class CheckpointError(TrlowError):
    """A checkpoint cannot be written, read, or does not fit the plan."""


def _listed(*facts: tuple[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts if value is not None)


def _with_facts(message: str, *facts: tuple[str, object]) -> str:
    listed = _listed(*facts)
    return f"{message} ({listed})" if listed else message
