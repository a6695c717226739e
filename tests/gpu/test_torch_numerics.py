"""A captured step of torch computes what plain torch does: on one GPU, in a loop, and under DDP.

Run as a script this file is one rank of the DistributedDataParallel that it is compared with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="no torch here: trlow.torch is not tested at all")
import trlow.torch  # noqa: E402
from trlow.torch import course  # noqa: E402

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(60)]
ROOT = str(Path(trlow.__file__).parents[1])
ROWS, WIDTH, CLASSES = 16, 64, 10
STEPS = 20
# Sums differ in order. AdamW divides by the root of a mean square, so a gradient near zero makes
# one weight differ by more than rounding, by 1e-3 a step at most; the host device differs by 3e-8.
CURVE, WEIGHTS = {"rel": 1e-4, "abs": 1e-5}, {"rtol": 1e-3, "atol": 2e-4}
# The same kernels and sums: what is left is the choice of algorithms.
SAME = {"rtol": 1e-4, "atol": 1e-6}


@pytest.fixture(autouse=True)
def exact(torch_threads):
    """No TF32."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(precision)


# ------------------------------------------------------------------------------ what is trained


def mlp():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)]
    return torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(WIDTH, CLASSES))


def normed():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, CLASSES))


def cross_entropy(module, batch):
    rows, labels = batch
    return torch.nn.functional.cross_entropy(module(rows), labels)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True, capturable=True)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)


def batches(steps=STEPS, rows=2 * ROWS):
    """On the host; labels follow from the rows, so there is something to learn."""
    generator = torch.Generator().manual_seed(1)
    truth = torch.randn(32, CLASSES, generator=generator)
    found = []
    for _ in range(steps):
        data = torch.randn(rows, 32, generator=generator)
        found.append((data, (data @ truth).argmax(1)))
    return found


def placed(device, rank):
    return torch.device("cpu") if device == "host" else torch.device("cuda", rank)


def on_host(state):
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


class Late(torch.nn.Module):
    """Uses a weight for more than its own gradient: it is read after that gradient is ready."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(32, WIDTH)
        self.square = torch.nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.last = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, rows):
        hidden = self.first(rows).relu() @ self.square.detach()
        return self.last((hidden @ self.square).relu())


def late():
    torch.manual_seed(0)
    return Late()


# ------------------------------------------------------------------------------ ways to train it


def replayed(settings, given, *, factory=mlp, optimizer=adamw, **options):
    """Losses, and the weights at the end: of all ranks, which have to be the same bytes."""
    with trlow.torch.StaticDataParallel(
        factory, cross_entropy, settings, optimizer=optimizer, **options
    ) as static:
        static.compile(given[0])
        losses = [static.step(batch) for batch in given]
        losses = [loss.item() for loss in losses]
        return losses, same_on_all_ranks(static)


def same_on_all_ranks(static):
    states = [on_host(module.state_dict()) for module in static.modules()]
    for state in states[1:]:
        for name, tensor in states[0].items():
            assert torch.equal(tensor, state[name]), name
    return states[0]


class Eager:
    """A loop of plain torch: every rank's module on its device, gradients summed in rank order."""

    def __init__(self, device, world_size, factory=mlp, optimizer=adamw, wire=None, clip=None):
        self.devices = [placed(device, rank) for rank in range(world_size)]
        self.modules = [factory().to(where).train() for where in self.devices]
        self.optimizers = [optimizer(module.parameters()) for module in self.modules]
        self.wire, self.clip = wire, clip

    def step(self, batch, autocast=None):
        """One batch of all ranks; the loss is the mean of theirs."""
        parts = zip(*(tensor.chunk(len(self.devices)) for tensor in batch), strict=True)
        losses = []
        for where, module, part in zip(self.devices, self.modules, parts, strict=True):
            module.zero_grad()
            with torch.autocast(where.type, autocast, enabled=autocast is not None):
                loss = cross_entropy(module, [tensor.to(where) for tensor in part])
            (loss / len(self.devices)).backward()
            losses.append(loss.item())
        for same in zip(*(module.parameters() for module in self.modules), strict=True):
            grads = [each.grad if self.wire is None else each.grad.to(self.wire) for each in same]
            total = grads[0].clone()
            for grad in grads[1:]:
                total += grad.to(total.device)
            for parameter in same:
                parameter.grad = total.to(parameter.device, parameter.dtype, copy=True)
        for module, optimizer in zip(self.modules, self.optimizers, strict=True):
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), self.clip)
            optimizer.step()
        return sum(losses) / len(losses)

    def state(self):
        return on_host(self.modules[0].state_dict())


def check_weights(mine, other, **tolerance):
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, other[name], **tolerance, msg=lambda m, n=name: n + m)


# ------------------------------------------------------------------------------ float32


def test_two_gpus_equal_one_with_twice_the_batch_and_plain_torch(device, gpu_settings):
    """Curves within 1e-4 of each other and weights within 2e-4 + 0.1 %, after 20 steps of AdamW."""
    given = batches()
    two, weights = replayed(gpu_settings(2), given)
    one, alone = replayed(gpu_settings(1), given)
    plain = Eager(device, 1)
    losses = [plain.step(batch) for batch in given]
    assert two[-1] < two[0]
    assert two == pytest.approx(one, **CURVE)
    assert two == pytest.approx(losses, **CURVE)
    check_weights(weights, alone, **WEIGHTS)
    check_weights(weights, plain.state(), **WEIGHTS)


def test_replay_equals_the_eager_step_of_the_same_code(device, gpu_settings):
    given = batches()
    losses, weights = replayed(gpu_settings(2), given, optimizer=sgd)
    eager = Eager(device, 2, optimizer=sgd)
    assert losses == pytest.approx([eager.step(batch) for batch in given], rel=1e-5)
    check_weights(weights, eager.state(), **SAME)


@pytest.mark.parametrize("buckets", [1, 3], ids=["one bucket", "three buckets"])
def test_weights_are_the_same_bytes_on_both_gpus_after_every_step(device, gpu_settings, buckets):
    """500 steps of which every one is compared, in two halves."""
    steps = 250 if device == "cuda" else 10
    pool = batches()
    with trlow.torch.StaticDataParallel(
        mlp, cross_entropy, gpu_settings(2), optimizer=adamw, buckets=buckets
    ) as static:
        static.compile(pool[0])
        before = same_on_all_ranks(static)
        for step in range(steps):
            static.step(pool[step % len(pool)])
            first, second = (module.state_dict() for module in static.modules())
            for name, tensor in first.items():
                assert torch.equal(tensor, second[name].to(tensor.device)), (step, name)
        after = same_on_all_ranks(static)
        assert not any(torch.equal(after[name], before[name]) for name in before)


def test_a_batch_may_lie_on_the_host_on_one_gpu_or_in_parts_on_both(device, gpu_settings):
    given = batches(6)
    settings = gpu_settings(2)
    _, wanted = replayed(settings, given)
    first = placed(device, 0)
    _, mine = replayed(settings, [tuple(t.to(first) for t in batch) for batch in given])
    check_weights(mine, wanted, rtol=0, atol=0)
    with trlow.torch.StaticDataParallel(mlp, cross_entropy, settings, optimizer=adamw) as static:
        static.compile(given[0])
        for rows, labels in given:
            pairs = zip(rows.chunk(2), labels.chunk(2), strict=True)
            shards = [
                tuple(part.to(placed(device, rank)) for part in pair)
                for rank, pair in enumerate(pairs)
            ]
            static.step(shards=shards)
        check_weights(same_on_all_ranks(static), wanted, rtol=0, atol=0)


# ------------------------------------------------------------------------------ options


def test_accumulate_equals_steps_of_the_concatenated_batches(device, gpu_settings):
    given = batches(8)
    losses, weights = replayed(gpu_settings(2), given, accumulate=2)
    plain = Eager(device, 1)
    pairs = zip(given[::2], given[1::2], strict=True)
    wanted = [plain.step([torch.cat(same) for same in zip(*pair, strict=True)]) for pair in pairs]
    means = [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)]
    assert means == pytest.approx(wanted, **CURVE)
    check_weights(weights, plain.state(), **WEIGHTS)


def early_or_not(factory, settings, monkeypatch, **options):
    """Losses and weights with updates where they may be, what that was, and with none early.

    NCCL sums the gradients: where ranks copy, no update is early.
    """
    options["exchange"] = "nccl"
    asked, ask = [], course.may_update_early

    def told(*arguments):
        asked.append(ask(*arguments))
        return asked[-1]

    monkeypatch.setattr(course, "may_update_early", told)
    mine = replayed(settings, batches(), factory=factory, **options)
    monkeypatch.setattr(course, "may_update_early", lambda *_: False)
    return mine, asked, replayed(settings, batches(), factory=factory, **options)


@pytest.mark.parametrize("optimizer", [adamw, sgd])
@pytest.mark.parametrize("options", [{"buckets": 3}, {"buckets": 2, "accumulate": 2}, {}])
def test_early_updates_are_the_same_bytes(device, gpu_settings, monkeypatch, optimizer, options):
    if device == "host":
        pytest.skip("the host device updates behind the backward, which is one function")
    options = {**options, "optimizer": optimizer}
    mine, asked, other = early_or_not(mlp, gpu_settings(2), monkeypatch, **options)
    assert asked == [True]
    assert mine[0] == other[0]
    for name, tensor in mine[1].items():
        assert torch.equal(tensor, other[1][name]), name


def test_a_weight_that_is_read_behind_its_gradient_is_not_updated_early(
    device, gpu_settings, monkeypatch
):
    found = early_or_not(late, gpu_settings(2), monkeypatch, buckets=5)
    (losses, weights), asked, _ = found
    assert asked == ([False] if device == "cuda" else [])  # the host device never updates early
    whole = Eager(device, 2, factory=late)
    assert losses == pytest.approx([whole.step(batch) for batch in batches()], **CURVE)
    for name, tensor in on_host(whole.modules[0].state_dict()).items():
        torch.testing.assert_close(weights[name], tensor, **WEIGHTS)


def test_clip_norm_is_that_of_torch(device, gpu_settings):
    given = batches(8)
    _, weights = replayed(gpu_settings(2), given, optimizer=sgd, clip_norm=0.05)
    eager = Eager(device, 2, optimizer=sgd, clip=0.05)
    for batch in given:
        eager.step(batch)
    check_weights(weights, eager.state(), **SAME)
    _, unclipped = replayed(gpu_settings(2), given, optimizer=sgd)
    assert (weights["0.weight"] - unclipped["0.weight"]).abs().max() > 1e-3


def test_gradients_reduced_in_bfloat16(device, gpu_settings):
    """Sums are rounded to 8 bits, by NCCL as by torch; a tie may fall to either side."""
    given = batches()
    losses, weights = replayed(gpu_settings(2), given, optimizer=sgd, wire=torch.bfloat16)
    eager = Eager(device, 2, optimizer=sgd, wire=torch.bfloat16)
    assert losses == pytest.approx([eager.step(batch) for batch in given], rel=1e-3)
    check_weights(weights, eager.state(), rtol=1e-2, atol=1e-3)


def test_a_schedule_of_torch_reaches_the_devices(device, gpu_settings):
    given = batches(9)
    plain = Eager(device, 1, optimizer=sgd)
    schedule = torch.optim.lr_scheduler.StepLR(plain.optimizers[0], 3, 0.1)
    with trlow.torch.StaticDataParallel(
        mlp, cross_entropy, gpu_settings(2), optimizer=sgd
    ) as static:
        mine = torch.optim.lr_scheduler.StepLR(static.optimizer, 3, 0.1)
        static.compile(given[0])
        for batch in given:
            static.step(batch)
            plain.step(batch)
            mine.step()
            schedule.step()
        assert static.optimizer.param_groups[0]["lr"] == pytest.approx(5e-5)
        before = same_on_all_ranks(static)
        check_weights(before, plain.state(), **SAME)
        for group in static.optimizer.param_groups:
            group["lr"] = 0.0
        static.step(given[0])
        check_weights(same_on_all_ranks(static), before, rtol=0, atol=0)
        rates = [float(m.update.optimizer.param_groups[0]["lr"]) for m in static._members]
        assert rates == [0.0, 0.0]


def test_batch_norm_statistics_are_the_mean_of_the_ranks_own(device, gpu_settings):
    given = batches()
    _, mine = replayed(gpu_settings(2), given, factory=normed, optimizer=sgd)
    eager = Eager(device, 2, factory=normed, optimizer=sgd)
    for batch in given:
        eager.step(batch)
        for name in ("running_mean", "running_var"):
            own = [getattr(module[1], name) for module in eager.modules]
            mean = sum(each.cpu() for each in own) / 2
            for each in own:
                each.copy_(mean)
    assert mine["1.num_batches_tracked"] == STEPS
    check_weights(mine, eager.state(), rtol=1e-3, atol=1e-5)


# ------------------------------------------------------------------------------ half precision


def test_bfloat16_autocast_follows_the_loop_and_float32(device, gpu_settings):
    given = batches()
    losses, _ = replayed(gpu_settings(2), given, optimizer=sgd, autocast=torch.bfloat16)
    half, full = (Eager(device, 2, optimizer=sgd) for _ in range(2))
    assert losses == pytest.approx([half.step(b, torch.bfloat16) for b in given], rel=1e-2)
    exact = [full.step(b) for b in given]
    assert losses == pytest.approx(exact, rel=5e-2)
    assert losses != exact


def test_float16_autocast_skips_a_step_that_overflows_and_halves_the_scale(device, gpu_settings):
    given = batches()
    rows, labels = given[0]
    huge = rows.clone()
    huge[0] *= 1e6  # of rank 0 alone, and infinite in float16
    full = Eager(device, 2, optimizer=sgd)
    with trlow.torch.StaticDataParallel(
        mlp, cross_entropy, gpu_settings(2), optimizer=sgd, autocast=torch.float16
    ) as static:
        scales = [member.update.scale for member in static._members]
        static.compile(given[0])
        losses = [static.step(batch).item() for batch in given[:10]]
        before, scale = same_on_all_ranks(static), scales[0].item()
        assert scale == 2.0**16
        static.step((huge, labels))
        after = same_on_all_ranks(static)
        assert [each.item() for each in scales] == [scale / 2] * 2
        check_weights(after, before, rtol=0, atol=0)
        losses += [static.step(batch).item() for batch in given[10:]]
        same_on_all_ranks(static)
        assert [each.item() for each in scales] == [scale / 2] * 2
    assert losses == pytest.approx([full.step(batch) for batch in given], rel=2e-2)


# ------------------------------------------------------------------------------ torch.compile


@pytest.mark.timeout(100)
@pytest.mark.filterwarnings("ignore")  # the compiler's own, of which some say what is deprecated
def test_a_module_compiled_layer_by_layer_trains(device, gpu_settings):
    def compiled():
        module = mlp()
        for layer in (module[0], module[2], module[4]):
            layer.compile(backend="inductor" if device == "cuda" else "aot_eager")
        return module

    given = batches()
    try:
        losses, weights = replayed(gpu_settings(2), given, factory=compiled)
    finally:
        torch.compiler.reset()
    plain = Eager(device, 1)
    assert losses == pytest.approx([plain.step(batch) for batch in given], **CURVE)
    check_weights(weights, plain.state(), **WEIGHTS)


# ------------------------------------------------------------------------------ against DDP


def ddp(rank, device, folder):
    """One of two processes: writes its losses, each of its own half of the batch."""
    import torch.distributed as dist

    where = placed(device, rank)
    if device == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group(
        "gloo" if device == "host" else "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        device_id=where if device == "cuda" else None,
    )
    torch.set_float32_matmul_precision("highest")
    module = torch.nn.parallel.DistributedDataParallel(
        mlp().to(where),
        device_ids=None if device == "host" else [rank],
        gradient_as_bucket_view=True,
        static_graph=True,
    )
    optimizer = adamw(module.parameters())
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        loss = cross_entropy(module, [tensor.chunk(2)[rank].to(where) for tensor in batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    Path(folder, f"losses-{rank}.json").write_text(json.dumps(losses))
    if rank == 0:
        torch.save(on_host(module.module.state_dict()), Path(folder, "weights.pt"))
    dist.destroy_process_group()


@pytest.mark.timeout(100)
def test_the_loss_curve_is_that_of_ddp(device, gpu_settings, tmp_path):
    loopback = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}
    environment = {**loopback, **os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), device, str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        mine, weights = replayed(gpu_settings(2), batches())
        limit = time.monotonic() + 70
        said = [rank.communicate(timeout=limit - time.monotonic())[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    curves = [json.loads((tmp_path / f"losses-{rank}.json").read_text()) for rank in range(2)]
    theirs = [sum(same) / 2 for same in zip(*curves, strict=True)]
    assert mine == pytest.approx(theirs, **CURVE)
    check_weights(weights, torch.load(tmp_path / "weights.pt"), **WEIGHTS)


if __name__ == "__main__":
    ddp(int(sys.argv[1]), sys.argv[2], sys.argv[3])
