"""One start: from a fresh process to the end of the first trained step. `start.py` runs it.

The process does what `trlow train` does with the digits and the CNN, but leaves after the first
step of the first epoch. Times are readings of the clock that the parent reads as well.
"""

import time

INTERPRETER = time.monotonic()  # before anything else is imported

import argparse  # noqa: E402  the imports are part of what is timed
import json  # noqa: E402
from collections.abc import Callable  # noqa: E402
from functools import wraps  # noqa: E402
from typing import Any  # noqa: E402

from trlow import data  # noqa: E402
from trlow.communicator import Communicators  # noqa: E402
from trlow.device import Platform  # noqa: E402
from trlow.nn.models import MODELS  # noqa: E402
from trlow.replay import Replay  # noqa: E402
from trlow.runtime import Runtime  # noqa: E402
from trlow.settings import Settings  # noqa: E402
from trlow.task import Task  # noqa: E402

IMPORTED = time.monotonic()
SPENT: dict[str, float] = {}


class FirstStepDone(Exception):  # noqa: N818  no error: it leaves the fit
    """The first step has been trained."""


def timed(owner: Any, method: str, name: str) -> None:
    """Add up the seconds spent in a method under `name`."""
    function: Callable[..., Any] = getattr(owner, method)

    @wraps(function)
    def around(*arguments: Any, **named: Any) -> Any:
        begun = time.monotonic()
        try:
            return function(*arguments, **named)
        finally:
            SPENT[name] = SPENT.get(name, 0.0) + time.monotonic() - begun

    setattr(owner, method, around)


def leave_after_first_step() -> None:
    """Let the train program run one step, then end the fit."""
    function = Replay.run

    @wraps(function)
    def run(self: Replay, steps: int, *arguments: Any, **named: Any) -> None:
        if self.program.name != "train":
            function(self, steps, *arguments, **named)
            return
        function(self, 1, *arguments, **named)
        raise FirstStepDone

    Replay.run = run  # type: ignore[method-assign]


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("settings", help="JSON: fields of Settings")
    arguments = made.parse_args()
    # Platform.open is a classmethod: its bound function is what is wrapped
    opened = Platform.open

    def open_platform(settings: Settings) -> Platform:
        begun = time.monotonic()
        platform = opened(settings)
        SPENT["libraries"] = time.monotonic() - begun
        return platform

    Platform.open = staticmethod(open_platform)  # type: ignore[assignment,method-assign]
    timed(Communicators, "__init__", "ncclCommInitAll")
    timed(Runtime, "__init__", "runtime")
    timed(Runtime, "capture", "capture")
    timed(Task, "_initialise", "initial state")
    leave_after_first_step()
    begun = time.monotonic()
    train, validation = data.load("digits")
    SPENT["data"] = time.monotonic() - begun
    settings = Settings(**json.loads(arguments.settings))
    with Task(settings, MODELS["cnn"](train.classes), train, validation, name="cnn") as task:
        task.compile()
        compiled = time.monotonic()
        try:
            task.fit(1)
        except FirstStepDone:
            done = time.monotonic()
    print(
        json.dumps(
            {
                "interpreter": INTERPRETER,
                "imported": IMPORTED,
                "compiled": compiled,
                "done": done,
                "closed": time.monotonic(),
                "spent": SPENT,
            }
        )
    )


if __name__ == "__main__":
    main()
