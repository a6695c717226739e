"""Imports point down only, stand at the top of a file, and the pure tower touches nothing foreign.

`FLOORS` is the picture of the package as data. A new module has to be given its floor here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import trlow

PACKAGE = Path(trlow.__file__).parent

# From the lowest floor to the highest. Modules in one tuple stand side by side and may not import
# each other.
FLOORS: list[tuple[str, ...]] = [
    # the pure tower
    ("errors", "version"),
    ("dtype",),
    ("settings", "dtensor"),
    ("region",),
    ("layout",),
    ("plan_text",),
    ("plan",),
    ("action", "range_check"),
    ("range_op", "exchange"),
    ("order",),
    ("program",),
    ("testing_plan", "testing_strategies"),
    ("testing_bytes",),
    ("testing_program", "testing_random", "testing_emulation"),
    # the foreign tower
    ("binding.prototype",),
    ("binding.clib",),
    ("binding.calls", "binding.cudart", "binding.nccl_config", "binding.nccl_header"),
    ("binding.nvrtc",),
    ("binding.driver", "binding.nccl"),
    ("binding.host",),
    ("binding",),
    ("nccl_variables", "kernel_cache", "interop"),
    ("loopback",),
    ("device", "kernel_image", "dlpack"),
    ("kernel", "arena", "ranks", "feed"),
    ("communicator",),
    ("nodes", "recording"),
    ("marks", "memsets", "transport"),
    ("enqueue",),
    ("capture", "warmup", "incident"),
    ("launching", "opening", "joint", "turn", "closing", "connection"),
    ("replay", "results"),
    ("team", "stepping"),
    ("eager",),
    ("runtime",),
    # above both
    ("nn",),
    ("testing_slots",),
    ("testing_arithmetic", "testing_device", "testing_replay"),
    ("testing",),
    ("data",),
    ("schedule", "batches", "report"),
    ("trace",),
    ("task",),
    ("measure",),
    ("torch.buckets", "torch.batches", "torch.work", "torch.rows", "torch.loss"),
    ("torch.fused", "torch.peers"),
    ("torch.update", "torch.payload", "torch.views", "torch.blame"),
    ("torch.member",),
    ("torch.host", "torch.rates"),
    ("torch.inputs",),
    ("torch.draws", "torch.streams"),
    ("torch.measure",),
    ("torch.course",),
    ("torch.cuda", "torch.blueprint"),
    ("torch.stages", "torch.captured"),
    ("torch.parallel",),
    ("torch",),
    ("bench",),
    ("interrupt",),
    ("cli",),
    ("__main__",),
    ("__init__",),
]
# Packages whose modules stand on one floor together; a test shows that they have no cycle.
FOLDERS = ("nn", "bench", "cli")

_NAMES = [name for entry in FLOORS for name in entry]
PURE = frozenset(_NAMES[: _NAMES.index("program") + 1])
BINDING = frozenset(name for name in _NAMES if name.startswith("binding"))
FOREIGN = frozenset(_NAMES[_NAMES.index("nccl_variables") : _NAMES.index("nn")])

# Heavy or optional packages, which load when they are used: inside the function that uses them.
LAZY = ("cuda", "rich", "sklearn", "matplotlib", "hypothesis")
LAZY_AT_TOP = {  # nothing but a test imports these
    "testing_strategies": "hypothesis",
    "testing_random": "hypothesis",
}

# What the pure tower may import beside itself. numpy is for dtype alone; os for settings alone.
PURE_STANDARD = {
    "__future__", "bisect", "collections", "dataclasses", "enum", "functools", "hashlib",
    "itertools", "json", "math", "operator", "re", "types", "typing",
}  # fmt: skip
PURE_EXTRA = {"dtype": {"numpy"}, "settings": {"os", "pathlib"}}

# Where the two towers meet. A plan becomes addresses in the arena and in the pinned slots; a
# program becomes calls, graphs and launches from enqueue to replay; team and runtime compose them.
# All other foreign modules know neither.
MEETING_POINTS = frozenset(
    {
        "arena",
        "feed",
        "enqueue",
        "capture",
        "stepping",
        "warmup",
        "launching",
        "opening",
        "replay",
        "results",
        "team",
        "eager",
        "runtime",
    }
)
PLAN_AND_PROGRAM = PURE - {"errors", "dtype", "settings"}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def sources() -> dict[str, str]:
    return {
        module_name(path): path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
        if "_native" not in path.parts
    }


def imports(source: str, known: set[str]) -> Iterator[tuple[str, bool]]:
    """Yield (absolute module name, stands at top level) of every import in `source`."""
    tree = ast.parse(source)
    top = {id(node) for node in tree.body}
    for node in tree.body:  # annotations' imports point down as all others do
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            top |= {id(inner) for inner in node.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in top
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                is_module = inner.removeprefix("trlow.") in known
                yield inner if is_module else str(node.module), id(node) in top


def floor(module: str) -> int:
    """The index in FLOORS; KeyError for a module that has been given none."""
    folder = module.split(".", maxsplit=1)[0]
    name = folder if folder in FOLDERS else module
    for index, entry in enumerate(FLOORS):
        if name in entry:
            return index
    raise KeyError(f"{module} has no floor: add it to FLOORS")


def offences(module: str, source: str, known: set[str]) -> list[str]:
    """Everything that `source`, as trlow's `module`, imports against the rules."""
    found = []
    folder = module.split(".", maxsplit=1)[0]
    for name, at_top in imports(source, known):
        root = name.split(".", maxsplit=1)[0]
        if not at_top and root not in LAZY:
            found.append(f"{module} imports {name} inside a block")
        if at_top and root in LAZY and LAZY_AT_TOP.get(module) != root:
            found.append(f"{module} imports {name} before it is used")
        if root == "torch" and folder != "torch":
            found.append(f"{module} imports {name}: torch lives in trlow.torch alone")
        if root != "trlow":
            allowed = PURE_STANDARD | PURE_EXTRA.get(module, set())
            if module in PURE and root not in allowed:
                found.append(f"{module} is pure and imports {name}")
            if folder == "nn" and root not in PURE_STANDARD | {"numpy"}:
                found.append(f"{module} is pure and imports {name}")
            continue
        target = name.removeprefix("trlow.") if name != "trlow" else "__init__"
        target_folder = target.split(".", maxsplit=1)[0]
        if folder in FOLDERS and target_folder == folder:
            continue
        if floor(target) >= floor(module):
            found.append(f"{module} imports {target}, which is not below it")
        if module in FOREIGN and module not in MEETING_POINTS and target in PLAN_AND_PROGRAM:
            found.append(f"{module} imports {target}: the towers meet in {sorted(MEETING_POINTS)}")
        if folder == "nn" and target not in PURE:
            found.append(f"{module} imports {target}, which is not pure")
        if module in BINDING and target in PURE and target != "errors":
            found.append(f"{module} imports {target}: the C floor knows errors only")
    return found


def cycles(folder: str, texts: dict[str, str]) -> list[str]:
    """Modules of `folder` that reach themselves through imports."""
    inside = {name for name in texts if name.split(".", maxsplit=1)[0] == folder}
    below = {
        name: {
            target.removeprefix("trlow.")
            for target, _ in imports(texts[name], set(texts))
            if target.removeprefix("trlow.") in inside
        }
        for name in inside
    }

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        queue = list(below[start])
        while queue:
            name = queue.pop()
            if name not in seen:
                seen.add(name)
                queue.extend(below[name])
        return seen

    return sorted(name for name in inside if name in reached(name))


def test_every_import_points_down():
    texts = sources()
    found = [line for name, text in texts.items() for line in offences(name, text, set(texts))]
    assert found == []


def test_every_module_has_a_floor_and_every_floor_a_module():
    texts = sources()
    for name in texts:
        floor(name)
    assert set(_NAMES) - set(texts) == set()
    assert len(_NAMES) == len(set(_NAMES))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_has_no_cycle(folder):
    assert cycles(folder, sources()) == []


def test_the_entrance_loads_no_foreign_package():
    """`trlow/__init__.py` may name everything, but importing numpy is all it may cost."""
    roots = {
        name.split(".", maxsplit=1)[0] for name, _ in imports(sources()["__init__"], set(sources()))
    }
    assert roots.isdisjoint(LAZY)


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("plan", "import ctypes", "plan is pure and imports ctypes"),
        ("plan", "import numpy", "plan is pure and imports numpy"),
        ("program", "import threading", "program is pure"),
        ("region", "from trlow.plan import MemoryPlan", "region imports plan, which is not below"),
        ("region", "from trlow import plan", "region imports plan, which is not below"),
        ("dtensor", "import trlow.settings", "dtensor imports settings, which is not below"),
        ("dtensor", "import trlow", "dtensor imports __init__, which is not below"),
        ("region", "if TYPE_CHECKING:\n    from trlow.plan import MemoryPlan", "not below"),
        ("kernel", "from trlow.program import Program", "the towers meet"),
        ("ranks", "from trlow.plan import MemoryPlan", "the towers meet"),
        ("data", "from sklearn.datasets import load_digits", "before it is used"),
        ("nn.layers", "from trlow.runtime import Runtime", "nn.layers imports runtime"),
        ("nn.layers", "import ctypes", "nn.layers is pure"),
        ("capture", "def f():\n    import trlow.replay", "inside a block"),
        ("capture", "def f():\n    import threading", "inside a block"),
        ("capture", "if True:\n    import threading", "inside a block"),
        ("binding.nccl", "from trlow.plan import MemoryPlan", "the C floor"),
    ],
)
def test_an_offence_is_seen(module, source, message):
    assert any(message in line for line in offences(module, source, set(sources()) | {"plan"}))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("plan", "from trlow.region import Region\nimport hashlib"),
        ("dtype", "import numpy as np"),
        ("plan", "if TYPE_CHECKING:\n    from trlow.region import Region"),
        ("settings", "import os"),
        ("capture", "from trlow.program import Program\nimport threading"),
        ("data", "def f():\n    from sklearn.datasets import load_digits"),
        ("nn.compiler", "from trlow.nn import layers\nfrom trlow import plan"),
        ("task", "from trlow import data, runtime\nfrom trlow.nn import compiler"),
    ],
)
def test_what_is_allowed_is_no_offence(module, source):
    assert offences(module, source, set(sources()) | {"plan", "nn.layers"}) == []


def test_a_cycle_is_seen():
    texts = {
        "nn.a": "from trlow.nn import b",
        "nn.b": "import trlow.nn.c",
        "nn.c": "from trlow.nn.a import x",
        "nn.d": "from trlow.nn import a",
    }
    assert cycles("nn", texts) == ["nn.a", "nn.b", "nn.c"]
