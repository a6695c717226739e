"""How a step is done on GPUs, decided for modules on the CPU, which need none for that."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="no torch here: trlow.torch is not tested at all")

import torch_cases as cases  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_exchange_cases import Hooked, at_once, plain, sgd, wide  # noqa: E402

from trlow.torch import measure  # noqa: E402
from trlow.torch.batches import BatchShape  # noqa: E402
from trlow.torch.blueprint import draw  # noqa: E402
from trlow.torch.buckets import cut  # noqa: E402
from trlow.torch.course import Course, course_on_gpus  # noqa: E402
from trlow.torch.measure import readiness  # noqa: E402
from trlow.torch.member import Member  # noqa: E402
from trlow.torch.rows import Table, rows  # noqa: E402
from trlow.torch.work import Wishes, Work  # noqa: E402

pytestmark = pytest.mark.timeout(60)
KINDS = ("weight", "bias")
LARGE = {"2.weight", "4.weight"}  # of 64 KiB and more
LAST = {"0.weight", "0.bias"}  # in the last of three buckets, which is sent by a kernel


def three():
    torch.manual_seed(0)
    layers = [nn.Linear(8, 2048), nn.ReLU(), nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 64)]
    return nn.Sequential(*layers)


def two_members(factory, optimizer=sgd, **options):
    """With a batch for them."""
    given = {"autocast": None, "accumulate": 1, "clip_norm": None, "world_size": 2, **options}
    work = Work(factory, cases.cross_entropy, optimizer, **given)
    members = [Member(rank, torch.device("cpu"), work) for rank in range(2)]
    (batch,) = cases.batches(1)
    shape = BatchShape(batch, 2)
    return members, shape, shape.cut(batch)


def measured(factory, optimizer=sgd, **options):
    """Members whose step was measured, with the batch and what `readiness` says."""
    made = two_members(factory, optimizer, **options)
    return *made, *readiness(*made)


def course(factory=three, optimizer=sgd, *, buckets=3, transport="peer", widens=False, **options):
    members, shape, shards, order, _ = measured(factory, optimizer, **options)
    known = {parameter.name: parameter for parameter in members[0].parameters()}
    found = cut([known[name] for name in order], buckets, 25 << 20)
    return course_on_gpus(members, shape, shards[0], found, transport=transport, widens=widens)


def test_a_plain_step_of_copies_is_fused_and_direct_and_at_the_end():
    direct = frozenset({*LARGE, *LAST})
    assert course() == Course(True, fused=True, adds=True, early=False, direct=direct)


def test_no_kernel_sends_what_goes_through_the_host_so_the_last_bucket_is_gathered():
    assert course(transport="host") == replace(course(), direct=frozenset(LARGE))
    assert course(transport="host", buckets=1) == replace(course(), direct=frozenset())


def test_all_reduces_gather_everything_and_let_weights_change_early():
    assert course(transport=None) == Course(False, True, True, True, frozenset())


def test_one_bucket_is_the_last_and_all_of_it_direct():
    assert course(buckets=1).direct == {f"{k}.{name}" for k in (0, 2, 4) for name in KINDS}


@pytest.mark.parametrize("options", [{"clip_norm": 1.0}, {"autocast": torch.float16}])
def test_what_needs_all_gradients_is_neither_early_nor_added_by_the_kernel(options):
    for transport in ("peer", "host", None):
        assert course(**options, transport=transport) == Course(transport is not None, fused=True)


def test_a_narrow_wire_is_added_ahead_of_the_kernel():
    assert course(widens=True) == Course(True, fused=True)
    assert course(widens=True, transport=None) == Course(False, fused=True, early=True)


def test_gradients_that_are_added_up_are_gathered():
    assert course(accumulate=2) == Course(True, fused=True, adds=True)


@pytest.mark.parametrize("optimizer", [plain, Hooked()])
def test_a_step_that_is_torchs_on_any_rank_is_torchs_on_all(optimizer):
    assert course(optimizer=optimizer) == Course(True)


def test_what_lies_otherwise_on_any_rank_is_gathered_on_all(monkeypatch):
    def told(member):
        return frozenset(member.trainable) - ({"2.weight"} if member.rank else set())

    monkeypatch.setattr(measure, "_steady", told)
    assert course().direct == {"4.weight", *LAST}


def test_gradients_of_plain_layers_lie_as_their_weights_do():
    module = three()
    module[2].weight = nn.Parameter(module[2].weight.detach().t().contiguous().t())
    assert course(lambda: copy.deepcopy(module)).direct == {*LARGE, *LAST}


def test_a_table_takes_rows_of_its_own_shape_alone():
    first, other = torch.arange(5000.0), torch.ones(5000)
    table = Table(torch.device("cpu"), rows([(first, other)], 4))
    swapped = torch.tensor(list(rows([(other, first)], 4)))
    assert table.takes(swapped)
    table.fill()
    assert torch.equal(table._there, swapped)
    assert not table.takes(swapped[:1])
    assert torch.equal(table._rows, swapped)


class Again(nn.Module):
    """Its first layer's backward is one of autograd's own inside of the backward."""

    def __init__(self):
        super().__init__()
        self.first, self.rest = nn.Linear(8, 32), nn.Linear(32, cases.CLASSES)

    def forward(self, rows):
        return self.rest(checkpoint(self.first, rows.requires_grad_(), use_reentrant=True))


def behind():
    """What comes all at once is not the end."""
    return nn.Sequential(nn.Linear(8, 8), at_once())


def ahead():
    return nn.Sequential(at_once(), nn.Linear(cases.CLASSES, cases.CLASSES))


@pytest.mark.parametrize(
    ("factory", "together"),
    [(wide, 1), (at_once, 10), (behind, 1), (ahead, 10)],
)
def test_gradients_of_one_node_become_ready_together(factory, together):
    assert measured(factory)[-1] == together


def test_a_gradient_that_no_node_of_the_graph_gives_is_ready_alone():
    assert measured(Again)[-1] == 1


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_gradients_of_a_compiled_module_become_ready_together():
    def compiled():
        return torch.compile(three(), backend="aot_eager")

    try:
        assert measured(compiled)[-1] == 6
    finally:
        torch.compiler.reset()


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("factory", [wide, at_once])
def test_what_is_ready_together_is_one_bucket_where_ranks_copy(factory, copies):
    wishes = Wishes(None, 1 << 17, None, "mean")
    drawn = draw(*two_members(factory), wishes, transport="peer" if copies else None, on_host=True)
    names = [name for bucket in drawn.buckets for name in bucket.names]
    assert len(names) == 10
    assert (len(drawn.buckets) == 1) is (copies and factory is at_once)
