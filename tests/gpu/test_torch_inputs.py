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


def losses_of_second_batches(static, given, rate):
    """Of one step with each batch but the first, all from the same weights."""
    start, found = static.state_dict(), []
    for batch in given[1:]:
        static.load_state_dict(start)
        static.optimizer.param_groups[0]["lr"] = rate
        found.append(static.step(batch).item())
    static.load_state_dict(start)
    return found


@pytest.mark.parametrize("streams", ["default", "others"])
@pytest.mark.parametrize(
    "place", ["each on its GPU", "each on the other GPU", "whole on one GPU", "and another rate"]
)
def test_a_batch_that_is_being_written_is_waited_for(static, place, streams):
    """The first step of all, too, and the one behind it, whose batch is another."""
    given = cases.batches(3)
    static.compile(given[0])
    losses = losses_of_second_batches(static, given, 0.0)  # a rate of 0 changes no weight
    static.compile(given[0])
    made = torch.cuda.default_stream if streams == "default" else torch.cuda.Stream
    mine = [made(gpu) for gpu in range(2)]
    late = []
    with torch.cuda.stream(mine[0]), torch.cuda.stream(mine[1]), torch.cuda.device(0):
        assert [torch.cuda.current_stream(gpu) for gpu in range(2)] == mine
        for number, batch in enumerate(given[1:]):
            if place == "and another rate":
                static.optimizer.param_groups[0]["lr"] = 1e-30 * number
            if place == "whole on one GPU":
                late.append(static.step(written_later(batch, 1, mine[1])))
                continue
            parts = zip(*(part.chunk(2) for part in batch), strict=True)
            order = (1, 0) if place == "each on the other GPU" else (0, 1)
            shards = [
                written_later(part, gpu, mine[gpu]) for part, gpu in zip(parts, order, strict=True)
            ]
            late.append(static.step(shards=shards))
    assert [each.item() for each in late] == pytest.approx(losses, rel=1e-5)
    cases.assert_same(*map(state_of, static.modules()))


def test_batches_from_everywhere_take_turns(static):
    """What is fetched from where it lies, and what goes through a buffer."""
    given = cases.batches(9)
    static.compile(given[0])
    losses = losses_of_second_batches(static, given, 0.0)
    late = []
    for number, (batch, source) in enumerate(
        zip(given[1:], ["gpu", "cpu", "gpu", "gpu", "odd", "gpu", "cpu", "cpu"], strict=True)
    ):
        shards = list(zip(*(part.chunk(2) for part in batch), strict=True))
        if source != "cpu":
            on_gpus = enumerate(shards)
            shards = [tuple(part.to(f"cuda:{gpu}") for part in shard) for gpu, shard in on_gpus]
        if source == "odd":  # strided
            shards = [(rows.t().contiguous().t(), labels) for rows, labels in shards]
        late.append(static.step(shards=shards))
        if number == 4:
            static.synchronize()
    assert [each.item() for each in late] == pytest.approx(losses, rel=1e-5)
