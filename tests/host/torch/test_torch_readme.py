"""The README's modules are trained as they stand, at sizes for a processor, so they cannot rot."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="no torch here: trlow.torch is not tested at all")

pytestmark = pytest.mark.timeout(100)
README = Path(__file__).parents[3] / "README.md"


def examples():
    part = README.read_text("utf-8").partition("## PyTorch")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)


def example(word):
    (code,) = [code for code in examples() if word in code.partition("\n")[0]]
    return code


def smaller(code, sizes):
    """Each size of the README has to be there, or the example is run as nobody reads it."""
    for old, new in sizes.items():
        assert old in code
        code = code.replace(old, new)
    return "import torch\ntorch.set_num_threads(1)\n" + code


def run(code):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "TRLOW_DEADLINE_S": "60"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [float(number) for number in re.findall(r"[\d.]+", done.stdout)]


def test_the_examples_are_these():
    assert len(examples()) == 3
    for code in examples():
        assert len([line for line in code.splitlines() if line.strip()]) <= 21


def test_the_mlp():
    (loss,) = run(smaller(example("MLP"), {"400": "16", "1024": "16"}))
    assert 1 < loss < 4  # of random labels: about the logarithm of 10


def test_resnet_50():
    pytest.importorskip("torchvision", reason="no torchvision: the README's ResNet-50 is not run")
    losses = run(smaller(example("ResNet-50"), {"64": "8", "224, 224": "32, 32"}))
    assert len(losses) == 3
    assert 4 < losses[0] < 10


def test_the_transformer():
    """Not compiled, which takes a compiler and most of a minute."""
    sizes = {
        "512, 8": "16, 2",
        "layer, 12": "layer, 2",
        "512": "16",
        "1000": "50",
        "32, 257": "8, 9",
    }
    code = smaller(example("Transformer"), {**sizes, "each.compile()": "pass"})
    losses = run(code)
    assert len(losses) == 4
    assert len(set(losses)) == 1  # four micro-steps of one batch: no update between them
