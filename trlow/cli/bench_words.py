"""The words of `trlow bench`, which are nccl-tests' wherever it has them."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from trlow.bench.collectives import COLLECTIVES
from trlow.bench.exact import OPS
from trlow.bench.variant import ALGORITHMS, BUFFERS, LAUNCHES, PROTOCOLS
from trlow.cli import bench, bench_plan
from trlow.cli.numbers import seconds, whole
from trlow.range_op import MEAN_STRATEGIES

Make = Callable[[str, str, str], argparse.ArgumentParser]
ABSENT = argparse.SUPPRESS
MEASURE = """\
Measure {name} over sizes and variants. Options of one letter mean what nccl-tests' do.

  trlow bench {name} -b 1K -e 64M -f 4                  eager, NCCL's own choice
  trlow bench {name} -b 1K -e 64M -f 4 -G 20            20 launches of a graph of 20 calls
  trlow bench {name} -b 1K -e 64M -f 4 --plot out.svg --algo Ring --proto LL,LL128,Simple

Lists measure every combination, each in a fresh process, in turn. Times are µs per call."""


def add(
    make: Make,
    add_model: Callable[[argparse.ArgumentParser], None],
) -> None:
    """Add every sub-command; `make(name, summary, text)` makes a parser."""
    for name, record in COLLECTIVES.items():
        command = make(
            name,
            f"measure {record.function if name != 'sendrecv' else 'ncclSend with ncclRecv'}",
            MEASURE.format(name=name),
        )
        command.set_defaults(run=bench.run, collective=name, place=None)
        _sizes(command)
        if record.reduces:
            command.add_argument(
                "-o", "--op", choices=OPS, default="sum", help="operation; mulsum multiplies first"
            )
        if record.rooted:
            command.add_argument(
                "-r", "--root", metavar="RANK", type=whole(0), default=0, help="root"
            )
        _ways(command)
        _variants(command, reduces=name == "all_reduce")
        _files(command)
    _plan(make, add_model)
    _compare(make)


def _plan(
    make: Make,
    add_model: Callable[[argparse.ArgumentParser], None],
) -> None:
    command = make(
        "plan",
        "measure a model's own communication, alone and beside a backward",
        "Measure the ranges that a model's plan communicates (both buckets, statistics, results): "
        "alone, and while a synthetic backward keeps the GPU busy.",
    )
    command.set_defaults(run=bench_plan.run)
    add_model(command)
    _devices(command)
    group = command.add_argument_group("measuring")
    group.add_argument(
        "--steps", metavar="N", type=whole(2), default=50, help="steps of each program and round"
    )
    group.add_argument("--rounds", metavar="N", type=whole(1), default=3, help="rounds, in turn")
    group.add_argument(
        "--json", metavar="FILE", default=ABSENT, help="write everything (default: none)"
    )


def _compare(make: Make) -> None:
    command = make(
        "compare",
        "compare two results size by size",
        "Ratio of the times of B over A per size, with its 95 % interval over rounds. A and B are "
        "files of --json, or nccl-tests' JSON (-J).",
    )
    command.add_argument("first", metavar="A.json", help="the reference")
    command.add_argument("second", metavar="B.json", help="what is compared with it")
    command.add_argument(
        "--fail-above",
        metavar="PERCENT",
        type=float,
        help="exit with 1 where B is slower by more than this, beyond noise",
    )
    command.set_defaults(run=bench.run_compare)


def _sizes(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("sizes")
    group.add_argument(
        "-b", "--minbytes", dest="least", metavar="SIZE", default="32M",
        help="least size in bytes; K, M and G are powers of 1024",
    )  # fmt: skip
    group.add_argument(
        "-e", "--maxbytes", dest="most", metavar="SIZE", default=ABSENT,
        help="largest size (default: 32M, or -b where that is larger)",
    )  # fmt: skip
    step = group.add_mutually_exclusive_group()
    step.add_argument(
        "-f", "--stepfactor", dest="factor", metavar="N", type=whole(2), default=ABSENT,
        help="each size is N times the one before (default: none)",
    )  # fmt: skip
    step.add_argument(
        "-i", "--stepbytes", dest="step", metavar="SIZE", default=ABSENT,
        help="each size is larger by this (default: 1M)",
    )  # fmt: skip
    group.add_argument(
        "-d", "--dtype", "--datatype", metavar="TYPE", default="float",
        help="int8, uint8, int32, uint32, int64, uint64, half, float, double, bfloat16, f8e4m3, "
        "f8e5m2",
    )  # fmt: skip


def _ways(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("measuring")
    group.add_argument(
        "-n", "--iters", dest="iterations", metavar="N", type=whole(1), default=20,
        help="timed calls; with -G, calls in one graph",
    )  # fmt: skip
    group.add_argument(
        "-w", "--warmup_iters", dest="warmups", metavar="N", type=whole(0), default=5,
        help="untimed calls (with -G launches) before each timed loop",
    )  # fmt: skip
    group.add_argument(
        "-G", "--cudagraph", dest="launches", metavar="N", type=whole(0), default=0,
        help="capture the calls as a graph and launch it N times; 0: call eagerly",
    )  # fmt: skip
    group.add_argument(
        "-c", "--check", dest="checks", metavar="N", type=whole(0), nargs="?", const=1, default=1,
        help="check every element of N untimed calls; 0: do not",
    )  # fmt: skip
    group.add_argument(
        "--rounds", metavar="N", type=whole(1), default=3,
        help="how often each size of each variant is measured, in turn",
    )  # fmt: skip
    place = group.add_mutually_exclusive_group()
    for name, text in (
        ("in-place", "the result replaces the input (the default, but for sendrecv)"),
        ("out-of-place", "the result goes to a buffer of its own"),
        ("both", "measure both"),
    ):
        place.add_argument(
            f"--{name}", dest="place", action="store_const", const=name, default=ABSENT, help=text
        )
    _devices(command)


def _devices(command: argparse.ArgumentParser) -> None:
    devices = command.add_argument_group("devices")
    devices.add_argument(
        "--device", choices=("auto", "host", "cuda"), default=ABSENT,
        help="auto takes the GPUs if there are any, otherwise the host device with 4 ranks "
        "(default: auto)",
    )  # fmt: skip
    devices.add_argument(
        "--gpus", metavar="LIST", default=ABSENT,
        help='devices, one rank on each: "0-3", "0,2,3" or "all" (default: all)',
    )  # fmt: skip
    devices.add_argument(
        "--deadline", metavar="SECONDS", type=seconds, default=60.0,
        help="a worker that does not answer for so long is ended; what was measured is kept",
    )  # fmt: skip


def _variants(command: argparse.ArgumentParser, *, reduces: bool) -> None:
    group = command.add_argument_group("variants, each a list")

    def add(option: str, known: tuple[str, ...], text: str, default: str = ABSENT) -> None:
        group.add_argument(
            option, metavar="LIST", default=default, help=f"{text}: {', '.join(known)}"
        )

    add("--algo", tuple(ALGORITHMS), "algorithms to force (default: NCCL's choice)")
    add("--proto", PROTOCOLS, "protocols to force (default: NCCL's choice)")
    add("--buffers", BUFFERS, "kinds of memory", "plain")
    add("--launch", LAUNCHES, "a thread per rank, or one thread with a group", "threads")
    group.add_argument(
        "--ctas", metavar="LIST", default=ABSENT,
        help='limits of CTAs, such as "1,4,8-16" (default: none)',
    )  # fmt: skip
    add("--mixing", ("on", "off"), "graph mixing support, with -G (default: NCCL's choice)")
    if reduces:
        add("--mean", MEAN_STRATEGIES, "trlow's ways to a mean over ranks (default: none)")
    group.add_argument(
        "--allow-unabortable", action="store_true", default=ABSENT,
        help="take --buffers window below NCCL 2.29.7 too, where a hang ends the worker",
    )  # fmt: skip
    group.add_argument(
        "--actual", action=argparse.BooleanOptionalAction, default=True,
        help="read algorithm, protocol and channels that NCCL took from its log, in a pass of its "
        "own",
    )  # fmt: skip


def _files(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("files")
    for name, what in (
        ("json", "everything, for `trlow bench compare`"),
        ("csv", "a line per row"),
        ("plot", "time and bandwidth over size, as .svg or .png"),
    ):
        group.add_argument(
            f"--{name}", metavar="FILE", default=ABSENT, help=f"{what} (default: none)"
        )
