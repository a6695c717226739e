"""Random numbers of a step: those that torch would draw without a capture, others in each step."""

from __future__ import annotations

import gc
import time

import pytest

from trlow.errors import CaptureError, RankError

torch = pytest.importorskip("torch", reason="no torch here: trlow.torch is not tested at all")
import trlow.torch  # noqa: E402

pytestmark = [
    pytest.mark.gpu(1),
    pytest.mark.timeout(100),
    pytest.mark.usefixtures("torch_threads"),
]
MIB = 1 << 20
STEPS = 8


class Attention(torch.nn.Module):
    """Dropout behind and inside of kernels."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.3, batch_first=True)

    def forward(self, rows):
        return self.layer(rows.view(-1, 4, 32)).reshape(-1, 32)


def mlp(middle):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 32), torch.nn.ReLU(), middle(), torch.nn.Linear(32, 10)]
    return torch.nn.Sequential(*layers)


def dropout():
    return mlp(torch.nn.Dropout)


def attention():
    return mlp(Attention)


def compiled():
    module = dropout()
    module.compile(dynamic=False)
    return module


def cross_entropy(module, batch):
    rows, labels = batch
    return torch.nn.functional.cross_entropy(module(rows), labels)


def sgd(rate):
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9, fused=True)


def batch():
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(32, 32, generator=generator)
    return data, (data[:, 0] > 0).long()


def made(settings, factory=dropout, rate=0.1, **options):
    return trlow.torch.StaticDataParallel(
        factory, cross_entropy, settings, optimizer=sgd(rate), **options
    )


def place(device):
    return torch.device("cuda:0" if device == "cuda" else "cpu")


def generator_state(device):
    return torch.cuda.get_rng_state(0) if device == "cuda" else torch.get_rng_state()


def losses_of(static, seed, steps=STEPS):
    torch.manual_seed(seed)
    return [static.step(batch()).item() for _ in range(steps)]


def losses_of_torch(device, factory, seed, accumulate):
    """The same steps by torch alone, nothing captured."""
    module = factory().to(place(device)).train()
    optimizer = sgd(0.1)(module.parameters())
    given = [tensor.to(place(device)) for tensor in batch()]
    found = []
    torch.manual_seed(seed)
    for step in range(1, STEPS + 1):
        loss = cross_entropy(module, given)
        (loss / accumulate).backward()
        if step % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("factory", [dropout, attention])
def test_a_step_draws_what_it_would_without_a_capture(device, gpu_settings, factory, accumulate):
    wanted = losses_of_torch(device, factory, 7, accumulate)
    state = generator_state(device)
    with made(gpu_settings(1), factory, accumulate=accumulate) as static:
        static.compile(batch())
        assert losses_of(static, 7) == pytest.approx(wanted, rel=1e-3)
        assert torch.equal(generator_state(device), state)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("factory", [dropout, attention, compiled])
def test_each_step_draws_other_numbers_and_a_seed_the_same_again(device, gpu_settings, factory):
    if factory is compiled and device == "host":
        pytest.skip("compiling for the host's processor shows nothing of a capture")
    with made(gpu_settings(1), factory, rate=0.0) as static:
        static.compile(batch())
        first = losses_of(static, 7)
        assert len(set(first)) == STEPS
        assert losses_of(static, 8) != first
        assert losses_of(static, 7) == first


def test_what_compile_draws_counts_as_not_drawn(device, gpu_settings):
    with made(gpu_settings(1)) as static:
        torch.manual_seed(3)
        before = generator_state(device)
        for _ in range(2):
            static.compile(batch())
            assert torch.equal(generator_state(device), before)


def test_other_work_draws_between_steps_as_it_would_without_a_capture(device, gpu_settings):
    module = dropout().to(place(device)).train()
    given = [tensor.to(place(device)) for tensor in batch()]
    ones = torch.ones(64, device=place(device))

    def series(step):
        torch.manual_seed(7)
        found = []
        for _ in range(4):
            found.append(step())
            found.append(torch.nn.functional.dropout(ones, 0.5).sum().item())
        return found

    wanted = series(lambda: cross_entropy(module, given).item())
    with made(gpu_settings(1), rate=0.0) as static:
        static.compile(batch())
        assert series(lambda: static.step(batch()).item()) == pytest.approx(wanted, rel=1e-3)
    assert len(set(wanted)) > 4


def test_a_step_has_drawn_when_it_returns(device, gpu_settings):
    if device == "host":
        pytest.skip("there a step draws when it runs")

    def found(static, read):
        losses, states = [], []
        for seed in range(12):
            torch.manual_seed(seed // 2)
            losses.append(static.step(batch()))
            states.append(generator_state(device))
            if read:
                static.synchronize()
        return [loss.item() for loss in losses], torch.stack(states)

    with made(gpu_settings(1), rate=0.0) as static:
        static.compile(batch())
        wanted = found(static, read=True)
        assert len(set(wanted[0])) == 6
        for _ in range(3):
            losses, states = found(static, read=False)
            assert losses == wanted[0]
            assert torch.equal(states, wanted[1])


class Fails(torch.nn.Module):
    """Raises behind dropout in the ``wanted``-th forward, and never later."""

    def __init__(self, wanted):
        super().__init__()
        self.calls, self.wanted = 0, wanted
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, rows):
        self.calls += 1
        rows = self.drop(rows)
        if self.calls == self.wanted:
            raise ValueError("planted")
        return rows


SAID = {
    "raises": "planted",
    "is invalidated": "capturing",
    "is not joined": "unjoined|Unjoined",
}


@pytest.mark.parametrize("how", SAID)
def test_a_capture_that_fails_leaves_torch_able_to_draw(device, gpu_settings, how):
    if device == "host":
        pytest.skip("the host device runs the forward in every replay, and captures none of it")

    class Waits(Fails):
        """No capture outlives that."""

        def forward(self, rows):
            try:
                return super().forward(rows)
            except ValueError:
                torch.cuda.current_stream().synchronize()
                raise

    class Strays(Fails):
        """Leaves work on a stream that nobody waits for, and goes on."""

        def forward(self, rows):
            try:
                return super().forward(rows)
            except ValueError:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    rows.add(1)
                return rows

    side = torch.cuda.Stream() if how == "is not joined" else None
    kind = {"raises": Fails, "is invalidated": Waits, "is not joined": Strays}[how]
    module, rows = [], torch.ones(1000, device=place(device))

    def factory():
        module.append(kind(0))
        return mlp(lambda: module[-1])

    with made(gpu_settings(1), factory) as static:
        static.compile(batch())
        module[0].wanted, module[0].calls = module[0].calls, 0  # the capture comes last
        with pytest.raises(CaptureError, match=SAID[how]):
            static.compile(batch())
        kept = torch.nn.functional.dropout(rows, 0.5).count_nonzero().item()
        assert 300 < kept < 700
        static.compile(batch())
        assert len(set(losses_of(static, 7))) == STEPS
        pinned = torch.empty(1 << 20).pin_memory()
        assert pinned.is_pinned()


@pytest.mark.gpu(2)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_ranks_that_draw_train_with_the_same_weights(gpu_settings, accumulate):
    with made(gpu_settings(2), attention, accumulate=accumulate) as static:
        static.compile(batch())
        found = losses_of(static, 7, 60)
        one, other = (list(module.parameters()) for module in static.modules())
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(one, other, strict=True))
        assert sum(found[-10:]) < 0.9 * sum(found[:10])


@pytest.mark.gpu(2)
@pytest.mark.parametrize("exchange", ["auto", "nccl"])
def test_a_step_that_fails_ends_within_the_deadline_and_compile_works_again(gpu_settings, exchange):
    """An abort of NCCL waits for all graphs that hold its kernels, torch's among them."""
    with made(gpu_settings(2), exchange=exchange) as static:
        static.compile(batch())
        losses_of(static, 7)
        side = static._captured.sides[1]

        def broken(*_):
            raise OSError("planted")

        side.before = broken
        begun = time.monotonic()
        with pytest.raises(RankError, match="planted"):
            static.step(batch()).item()
        assert time.monotonic() - begun < 8  # an abort that waits in vain takes 10 s
        assert not static._captured.runtime.dead
        static.compile(batch())
        assert len(set(losses_of(static, 7))) == STEPS


def test_compiling_again_gives_memory_back(device, gpu_settings):
    if device == "host":
        pytest.skip("the host device captures nothing of torch's")
    used = []
    with made(gpu_settings(1), attention) as static:
        for _ in range(3):
            static.compile(batch())
            static.step(batch()).item()
            gc.collect()
            free, total = torch.cuda.mem_get_info(0)
            used.append(total - free)
    assert used[2] - used[0] <= 4 * MIB, used
