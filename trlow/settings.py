"""Settings: what a run is asked to do, checked before anything is allocated.

This is the one reader of the environment. Each field may come from a variable named TRLOW_ and the
field's name in capitals (TRLOW_GPUS, TRLOW_DEADLINE_S); an empty one counts as unset. What trlow
has to tell NCCL in the environment is written here too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import PurePath
from typing import Any

from trlow.errors import SettingsError

__all__ = [
    "Settings",
    "check_variables",
    "parse_gpus",
    "set_variables",
    "unknown_variables",
    "variables_in_effect",
]

_DEVICES = ("auto", "host", "cuda")
_ARENAS = ("plain", "window")
_TRANSPORTS = ("auto", "peer", "host")
_FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What one run is asked to do. Raises SettingsError for a value that cannot be used."""

    device: str = "auto"  # "host", "cuda", or "auto": the GPUs if there are any, else the host
    gpus: str = "all"  # devices to use, one rank each: "all", "0-3", "0,2,3"
    any_world_size: bool = False  # allow world sizes that are no power of two
    global_batch_size: int | None = None  # rows of one step over all ranks
    seed: int = 0
    deadline_s: float = 60.0  # seconds a step may make no progress
    arena: str = "plain"  # "window": a symmetric NCCL window on all ranks, so at least two
    # How trlow.exchange copies from rank to rank (NCCL chooses for itself): "peer" over a link,
    # "host" through pinned memory of the host, "auto" over links where all ranks have them.
    transport: str = "auto"
    allow_unabortable: bool = False  # windows below NCCL 2.29.7: a hang there ends the process
    watch: bool = True  # graphs tell how far they are, so that a hang on the device is noticed
    nccl_library: str | None = None  # paths; None: look for them
    cudart_library: str | None = None
    driver_library: str | None = None
    host_library: str | None = None
    kernel_cache: str | None = None  # folder of compiled kernels; None: the user's cache; "off"
    loopback_only: bool = False  # NCCL listens on the loopback interface alone
    # False: NCCL leaves out the nodes that let graphs overlap with other graphs or eager calls of
    # one communicator. trlow never does that, but the variable is for all of the process.
    graph_mixing: bool = True
    host_devices: int = 4  # devices that the host device shows
    host_workers: int = 0  # its threads; 0: one for each core
    host_schedule_seed: int = 0  # 0: work starts in the order issued; else that order is shuffled

    def __post_init__(self) -> None:
        """Check every field that can be checked without a device."""
        if self.device not in _DEVICES:
            known = ", ".join(_DEVICES)
            raise SettingsError(f"device {self.device!r} is unknown; use one of {known}")
        if self.arena not in _ARENAS:
            raise SettingsError(f"arena {self.arena!r} is unknown; use one of {', '.join(_ARENAS)}")
        if self.transport not in _TRANSPORTS:
            known = ", ".join(_TRANSPORTS)
            raise SettingsError(f"transport {self.transport!r} is unknown; use one of {known}")
        parse_gpus(self.gpus)
        if self.global_batch_size is not None:
            _check_int("global batch size", self.global_batch_size, 1)
        _check_int("seed", self.seed, 0, 2**64 - 1)
        _check_int("host devices", self.host_devices, 1, 2**31 - 1)
        _check_int("host workers", self.host_workers, 0, 2**31 - 1)
        _check_int("host schedule seed", self.host_schedule_seed, 0, 2**64 - 1)
        _check_cache(self.kernel_cache)
        deadline: object = self.deadline_s
        if (
            isinstance(deadline, bool)
            or not isinstance(deadline, (int, float))
            or not (0 < deadline < math.inf)
        ):
            raise SettingsError(
                f"deadline of {deadline!r} seconds must be a number above 0, and finite"
            )

    @classmethod
    def from_environment(cls, **overrides: Any) -> Settings:
        """Settings from TRLOW_* variables; a keyword given here wins over its variable."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            variable = f"TRLOW_{field.name.upper()}"
            text = os.environ.get(variable, "")
            if text and field.name not in overrides:
                values[field.name] = _convert(variable, text, str(field.type))
        return cls(**values, **overrides)

    @property
    def kernel_cache_folder(self) -> str | None:
        """Where compiled kernels are kept: trlow/kernels in the user's cache; None when off.

        The user's cache is XDG_CACHE_HOME, or else .cache in the home folder. Without either, or
        where they are no absolute paths, nothing is kept.
        """
        if self.kernel_cache is not None:
            return None if self.kernel_cache == "off" else self.kernel_cache
        base = PurePath(os.environ.get("XDG_CACHE_HOME", ""))
        if not base.is_absolute():  # the XDG specification: a relative one is ignored
            base = PurePath(os.environ.get("HOME", ""), ".cache")
        return str(base / "trlow" / "kernels") if base.is_absolute() else None

    def devices(self, count: int) -> tuple[int, ...]:
        """Return the device of each rank on a machine with `count` devices.

        Raises SettingsError for devices that the machine lacks and, unless `any_world_size`, for a
        number of ranks that is no power of two.
        """
        _check_int("number of devices on this machine", count, 1)
        chosen = parse_gpus(self.gpus)
        beyond = max(chosen or (0,))
        if beyond >= count:
            more = f", or have the host device show more: host_devices={beyond + 1}"
            host = "on the host device " if self.device == "host" else ""
            raise SettingsError(
                f"gpus {self.gpus!r}: device {beyond} is beyond this machine, which has {count} "
                f"{host}(0 to {count - 1}); name only those{'' if self.device == 'cuda' else more}"
            )
        if chosen is None:  # "all" is known once the count is
            chosen = tuple(range(count))
        if len(chosen) & (len(chosen) - 1) and not self.any_world_size:
            raise SettingsError(
                f"gpus {self.gpus!r} gives {len(chosen)} ranks; the world size must be a power of "
                "two: name another number of devices, or set any_world_size"
            )
        return chosen

    def local_batch_size(self, world_size: int) -> int:
        """Return the rows of one step on each rank. Raises SettingsError if they are not whole."""
        _check_int("world size", world_size, 1)
        if self.global_batch_size is None:
            raise SettingsError("no global batch size is set; set global_batch_size")
        if self.global_batch_size % world_size:
            below = self.global_batch_size // world_size * world_size
            raise SettingsError(
                f"global batch size {self.global_batch_size} is not divisible by world size "
                f"{world_size}; use {below or below + world_size} or {below + world_size}"
            )
        return self.global_batch_size // world_size


def parse_gpus(text: str, *, count: int | None = None) -> tuple[int, ...] | None:
    """Return the devices that "0-3", "0,2,3" or "all" names, in that order.

    `count` is the number of devices of the machine; None leaves "all" open and returns None.
    Raises SettingsError for a list with an empty, negative, reversed, repeated or unknown item.
    """
    if not isinstance(text, str):
        raise SettingsError(f'gpus {text!r} must be a string like "all", "0-3" or "0,2,3"')
    if text.strip() == "all":
        return None if count is None else tuple(range(count))
    chosen: list[int] = []
    for item in text.split(","):
        first, last = _parse_item(text, item.strip())
        if count is not None and last >= count:
            raise SettingsError(
                f"gpus {text!r}: device {last} is beyond this machine, which has {count} "
                f"(0 to {count - 1}); name only those"
            )
        # Without a count a long interval is bounded here, so that a slip fills no memory.
        if last - first >= _MOST_DEVICES:
            raise SettingsError(f"gpus {text!r}: {item!r} has more than {_MOST_DEVICES} devices")
        chosen.extend(range(first, last + 1))
    repeated = sorted({device for device in chosen if chosen.count(device) > 1})
    if repeated:
        raise SettingsError(f"gpus {text!r} names device {repeated[0]} twice; name each once")
    return tuple(chosen)


def variables_in_effect() -> dict[str, str]:
    """Return the environment variables that trlow, CUDA, NCCL and the loader read here, by name."""
    prefixes = ("TRLOW_", "NCCL_", "CUDA_")
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(prefixes) or name == "LD_LIBRARY_PATH"
    }


def check_variables() -> None:
    """Raise SettingsError for a TRLOW_* variable that no setting has: a slip would go unnoticed."""
    unknown = unknown_variables()
    if unknown:
        raise SettingsError(
            f"{', '.join(unknown)}: no such variable; known are {', '.join(_variables())}"
        )


def unknown_variables() -> list[str]:
    """Return the names of the TRLOW_* variables that nothing reads; TRLOW_TEST_* is the tests'."""
    known = _variables()
    return [
        name
        for name in variables_in_effect()
        if name.startswith("TRLOW_") and name not in known and not name.startswith("TRLOW_TEST_")
    ]


def _variables() -> list[str]:
    return [f"TRLOW_{field.name.upper()}" for field in fields(Settings)]


def set_variables(values: Mapping[str, str]) -> None:
    """Put variables into this process's environment, for libraries that read nothing else."""
    os.environ.update(values)


_MOST_DEVICES = 4096


def _parse_item(text: str, item: str) -> tuple[int, int]:
    first, dash, last = item.partition("-")
    ends = (first, last if dash else first)
    if not all(end.isascii() and end.isdigit() and len(end) < 10 for end in ends):
        raise SettingsError(
            f'gpus {text!r}: {item!r} is neither a device number nor an interval like "0-3"; '
            'devices count from 0, "all" takes every one'
        )
    low, high = int(ends[0]), int(ends[1])
    if low > high:
        raise SettingsError(
            f'gpus {text!r}: interval {item!r} runs backwards; write "{high}-{low}"'
        )
    return low, high


def _check_int(what: str, value: object, least: int, most: int | None = None) -> None:
    limit = f"at least {least}" if most is None else f"from {least} to {most}"
    if type(value) is not int or value < least or (most is not None and value > most):
        raise SettingsError(f"{what} {value!r} must be an int, {limit}")


def _check_cache(folder: object) -> None:
    if folder is None or folder == "off":
        return
    if not isinstance(folder, str) or not PurePath(folder).is_absolute():
        raise SettingsError(f'kernel cache {folder!r} must be an absolute path, or "off"')


def _convert(variable: str, text: str, kind: str) -> object:
    """Read a variable's text as its field's type."""
    if kind.startswith("str"):
        return text
    if kind.startswith("bool"):
        if text.lower() not in _FLAGS:
            raise SettingsError(f"{variable}={text!r} must be one of {', '.join(_FLAGS)}")
        return _FLAGS[text.lower()]
    try:
        return float(text) if kind.startswith("float") else int(text)
    except ValueError as error:
        raise SettingsError(f"{variable}={text!r} must be a number ({kind})") from error
