"""Variables that NCCL reads once in a process: set before its first use through trlow, or refused.

They stay set, and cannot be asked for later. What another user of the same library in this process
does with it is not seen here.
"""

from __future__ import annotations

from collections.abc import Mapping

from trlow.errors import SettingsError
from trlow.settings import variables_in_effect

_at_first_use: dict[str, str] | None = None  # the variables that this process's NCCL has read


def in_effect() -> dict[str, str]:
    """What NCCL has read in this process, or would read now; an empty one counts as unset."""
    have = variables_in_effect() if _at_first_use is None else _at_first_use
    return {name: value for name, value in have.items() if value}


def missing_for(field: str, other: str, wanted: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """What has to be set for a field of Settings.

    ``wanted`` has for each variable the values that will do, the best one first; ``other`` is a
    value with which the field asks for nothing. Raises ``SettingsError`` where the user set one
    otherwise, or NCCL was used in this process without them.
    """
    have, instead = in_effect(), remedy(field, other)
    for name, accepted in wanted.items():
        if name in have and have[name] not in accepted:
            raise SettingsError(
                f"{name}={have[name]!r} is set, but {field} needs {accepted[0]!r}; unset it, "
                f"{instead}"
            )
    missing = {name: accepted[0] for name, accepted in wanted.items() if name not in have}
    if missing and _at_first_use is not None:
        raise SettingsError(
            f"{field} comes too late: NCCL was used in this process without it, and reads "
            f"{', '.join(missing)} only once; set it in the process's first Settings, {instead}"
        )
    return missing


def remedy(field: str, other: str) -> str:
    """The end of an error: how to do without."""
    flag = {"True": "1", "False": "0"}[other]
    return f"or set {field}={other} (TRLOW_{field.upper()}={flag})"


def note_first_use() -> None:
    """NCCL is about to be used in this process: what is not set by now is too late."""
    global _at_first_use  # NCCL's own state is the process's, too
    if _at_first_use is None:
        _at_first_use = variables_in_effect()
