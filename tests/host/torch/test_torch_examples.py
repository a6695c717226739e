"""The examples of trlow/torch/README.md, as they stand but for their sizes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[3] / "trlow" / "torch" / "README.md"
TINY = {
    "ROWS = 400": "ROWS = 16",
    "ROWS, SIZE = 64, 224": "ROWS, SIZE = 8, 32",
    "ROWS, LENGTH, WIDTH, LAYERS, WORDS = 32, 256, 512, 12, 8192": (
        "ROWS, LENGTH, WIDTH, LAYERS, WORDS = 8, 8, 16, 2, 32"
    ),
}
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.timeout(110)
@pytest.mark.parametrize("block", BLOCKS, ids=["mlp", "resnet50", "transformer"])
def test_an_example_trains(block):
    if "torchvision" in block and importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    code = block
    for large, tiny in TINY.items():
        code = code.replace(large, tiny)
    assert code != block
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "TRLOW_DEVICE": "host", "TRLOW_DEADLINE_S": "30"},
    )
    if "torchvision" in block and "operator torchvision::nms does not exist" in done.stderr:
        pytest.skip("this torchvision does not fit this torch")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"\d+\.\d+", done.stdout)
