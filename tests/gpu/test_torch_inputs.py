"""How batches get into a step on two GPUs."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="no torch here: trlow.torch is not tested at all")

import torch_cases as cases  # noqa: E402
from torch_exchange_cases import sgd, state_of, wide  # noqa: E402

from trlow.torch import StaticDataParallel  # noqa: E402

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(60), pytest.mark.usefixtures("torch_threads")]
A_WHILE = 100_000_000  # cycles, some 50 ms


@pytest.fixture
def static(device, gpu_settings):
    if device != "cuda":
        pytest.skip("a batch in the memory of the host is complete when it is given")
    with StaticDataParallel(wide, cases.cross_entropy, gpu_settings(2), optimizer=sgd) as made:
        yield made


def written_later(batch, gpu, stream):
    """The batch on a GPU; its rows are not numbers until the stream has slept."""
    rows, labels = (part.to(f"cuda:{gpu}") for part in batch)
    empty = torch.full_like(rows, torch.nan)
    torch.cuda.synchronize(gpu)
    with torch.cuda.device(gpu), torch.cuda.stream(stream):
        torch.cuda._sleep(A_WHILE)
        empty.copy_(rows)
    return empty, labels


@pytest.mark.parametrize("streams", ["default", "others"])
@pytest.mark.parametrize("place", ["each on its GPU", "each on the other GPU", "whole on one GPU"])
def test_a_batch_that_is_being_written_is_waited_for(static, place, streams):
    example, batch = cases.batches(2)
    static.compile(example)
    start = static.state_dict()
    loss = static.step(batch).item()
    static.load_state_dict(start)
    made = torch.cuda.default_stream if streams == "default" else torch.cuda.Stream
    mine = [made(gpu) for gpu in range(2)]
    with torch.cuda.stream(mine[0]), torch.cuda.stream(mine[1]), torch.cuda.device(0):
        assert [torch.cuda.current_stream(gpu) for gpu in range(2)] == mine
        if place == "whole on one GPU":
            late = static.step(written_later(batch, 1, mine[1]))
        else:
            parts = zip(*(part.chunk(2) for part in batch), strict=True)
            order = (0, 1) if place == "each on its GPU" else (1, 0)
            shards = [
                written_later(part, gpu, mine[gpu]) for part, gpu in zip(parts, order, strict=True)
            ]
            late = static.step(shards=shards)
    assert late.item() == pytest.approx(loss, rel=1e-5)
    cases.assert_same(*map(state_of, static.modules()))
