"""trlow: static data parallelism on all GPUs of one machine, from one Python process.

    settings -> dtensor -> plan -> program -> capture -> replay
     (what)     (shapes)  (bytes)  (order)    (device)   (time)
     pure: no ctypes, no clock,             foreign: calls C,
     no threads, no GPU                     decides nothing

Read in this order: region.py, plan.py, range_op.py, program.py, capture.py, replay.py.

The names below are the whole public surface of the package itself; ``trlow.range_op`` makes range
operations (``trlow.exchange`` those for sums by copies), ``trlow.binding`` holds the C functions,
``trlow.nn`` and ``trlow.task`` train models, ``trlow.testing`` has strategies and invariants for
tests of your own. Importing ``trlow`` loads no shared library.
"""

from trlow import interrupt, range_op  # noqa: F401  first of all: for Ctrl-C during the rest
from trlow.dtensor import DTensor
from trlow.dtype import BF16, F16, F32, I32, U8, DType
from trlow.errors import TrlowError
from trlow.plan import MemoryPlan, PlanBuilder, Range
from trlow.program import External, Program, Stage, Stream
from trlow.region import CNN_TABLE, READINESS_TABLE, BucketSpec, Region, RegionTable, bucket_table
from trlow.replay import Replay
from trlow.runtime import Runtime
from trlow.settings import Settings
from trlow.version import __version__

__all__ = [
    "BF16",
    "CNN_TABLE",
    "F16",
    "F32",
    "I32",
    "READINESS_TABLE",
    "U8",
    "BucketSpec",
    "DTensor",
    "DType",
    "External",
    "MemoryPlan",
    "PlanBuilder",
    "Program",
    "Range",
    "Region",
    "RegionTable",
    "Replay",
    "Runtime",
    "Settings",
    "Stage",
    "Stream",
    "TrlowError",
    "__version__",
    "bucket_table",
    "range_op",
]
