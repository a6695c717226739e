"""The words of the command line.

argparse's own errors take several lines; here every error of use is one line on stderr, and the
exit code is 2.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import NoReturn

from trlow.cli import bench_words, doctor, plan, train
from trlow.cli.numbers import rate, seconds, whole
from trlow.nn.models import MODELS
from trlow.range_op import MEAN_STRATEGIES

EPILOG = """\
variables: TRLOW_SEED=1 stands for --seed 1, and so on; an option wins over its variable
exit codes: 0 done, 1 failed while running, 2 asked for what cannot be, 70 hung beyond recovery,
130 interrupted with Ctrl-C"""


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message and where help is; exit with 2."""
        line = " ".join(message.split())
        self.exit(2, f"{self.prog}: error: {line} (see {self.prog} --help)\n")


def build(version: str) -> Parser:
    """Return the parser of all commands; each sets `run`, a function of the parsed arguments."""
    parser = Parser(
        prog="trlow",
        description="Train one model on all GPUs of a machine from one process, "
        "or on the host device where there is no GPU.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"trlow {version}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_train(commands)
    _add_plan(commands)
    _add_bench(commands)
    _add_doctor(commands)
    return parser


def _command(
    commands: argparse._SubParsersAction[Parser], name: str, summary: str, text: str
) -> Parser:
    return commands.add_parser(
        name,
        help=summary,
        description=text,
        epilog=EPILOG,
        formatter_class=Formatter,
        allow_abbrev=False,
    )


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and keeps the epilog's lines."""


def _add_train(commands: argparse._SubParsersAction[Parser]) -> None:
    command = _command(
        commands,
        "train",
        "train a model and validate it after every epoch",
        "Train a model over all ranks, validate it after every epoch, and write a report.",
    )
    _add_devices(command)
    _add_model(command)
    training = command.add_argument_group("training")
    _add_schedule(training)
    _add_step(training)
    _add_outputs(training)
    command.set_defaults(run=train.run)


def _add_schedule(training: argparse._ArgumentGroup) -> None:
    """Add how long, how fast and from where."""
    training.add_argument(
        "--epochs", metavar="N", type=whole(1), default=12, help="epochs to train"
    )
    training.add_argument(
        "--lr", metavar="X", type=rate, default=0.2, help="learning rate, the schedule's highest"
    )
    training.add_argument(
        "--schedule",
        choices=("constant", "cosine"),
        default="cosine",
        help="how the learning rate goes over the steps",
    )
    training.add_argument(
        "--seed",
        metavar="N",
        type=whole(0),
        default=argparse.SUPPRESS,
        help="seed of the initial weights and of the order of the rows (default: 0)",
    )


def _add_step(training: argparse._ArgumentGroup) -> None:
    """Add what does not change the result beyond rounding: how a step is launched and reduced."""
    training.add_argument(
        "--replay",
        choices=("fused", "staged"),
        default="fused",
        help="one graph per step, or one graph per stage ordered by events",
    )
    training.add_argument(
        "--mean-strategy",
        choices=MEAN_STRATEGIES,
        default="deferred",
        help="how gradients become their mean over ranks: 1/N left to the optimizer's update, a "
        "scale after the sum, NCCL's average, or a premultiplied sum",
    )


def _add_outputs(training: argparse._ArgumentGroup) -> None:
    """Add the files that a training leaves."""
    training.add_argument(
        "--report",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="write a report as JSON (default: none)",
    )
    training.add_argument(
        "--trace",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="after training, write some steps as a Chrome/Perfetto trace and report what "
        "communication adds to a step; both of the fused step, whatever --replay says "
        "(default: none)",
    )


def _add_devices(command: Parser) -> None:
    """Add where the ranks run, and in what memory."""
    devices = command.add_argument_group("devices")
    devices.add_argument(
        "--device",
        choices=("auto", "host", "cuda"),
        default=argparse.SUPPRESS,
        help="auto takes the GPUs if there are any, otherwise the host device with 4 ranks "
        "(default: auto)",
    )
    devices.add_argument(
        "--gpus",
        metavar="LIST",
        default=argparse.SUPPRESS,
        help='devices to use, one rank on each: "0-3", "0,2,3" or "all"; not with --ranks '
        "(default: all)",
    )
    devices.add_argument(
        "--ranks",
        metavar="N",
        type=whole(1),
        default=argparse.SUPPRESS,
        help="how many ranks, on devices 0 to N-1; not with --gpus (default: one per device)",
    )
    devices.add_argument(
        "--any-world-size",
        action="store_true",
        default=argparse.SUPPRESS,
        help="allow a number of ranks that is not a power of two (default: False)",
    )
    devices.add_argument(
        "--deadline",
        metavar="SECONDS",
        type=seconds,
        default=argparse.SUPPRESS,
        help="end with an error when nothing moves on any rank for so long (default: 60)",
    )
    devices.add_argument(
        "--arena",
        choices=("plain", "window"),
        default=argparse.SUPPRESS,
        help="window: the memory of all ranks is one symmetric NCCL window (default: plain)",
    )
    devices.add_argument(
        "--allow-unabortable",
        action="store_true",
        default=argparse.SUPPRESS,
        help="take --arena window below NCCL 2.29.7 too, where a hang ends the process",
    )


def _add_model(command: argparse.ArgumentParser) -> None:
    """Add what decides the plan: `train` and `plan` take the same words for it."""
    group = command.add_argument_group("model and data")
    group.add_argument(
        "--model", choices=tuple(MODELS), default="cnn", help="convolutional or fully connected"
    )
    group.add_argument(
        "--data",
        metavar="SPEC",
        default="digits",
        help="digits (1797 handwritten digits of scikit-learn) or idx:DIR (MNIST's four files, "
        "gzipped or not)",
    )
    group.add_argument(
        "--global-batch-size",
        metavar="N",
        type=whole(1),
        default=argparse.SUPPRESS,
        help="rows of one step over all ranks; the number of ranks must divide it (default: 128)",
    )
    group.add_argument(
        "--optimizer",
        choices=("sgd", "momentum", "nesterov"),
        default="momentum",
        help="how gradients become weights; momentum is 0.9",
    )


def _add_plan(commands: argparse._SubParsersAction[Parser]) -> None:
    command = _command(
        commands,
        "plan",
        "show the memory plan of a model",
        "Show where every region of a model's arena lies. Needs no device: the plan is arithmetic.",
    )
    _add_model(command)
    command.add_argument("--ranks", metavar="N", type=whole(1), default=4, help="how many ranks")
    command.add_argument(
        "--any-world-size",
        action="store_true",
        default=argparse.SUPPRESS,
        help="allow a number of ranks that is not a power of two (default: False)",
    )
    command.add_argument(
        "--json",
        action="store_true",
        help="print a report of the plan as JSON instead of a table; MemoryPlan.from_json reads "
        "what MemoryPlan.to_json writes, not this",
    )
    command.add_argument(
        "--svg",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="draw the arena, to scale, with its buckets (default: none)",
    )
    command.set_defaults(run=plan.run)


def _add_bench(commands: argparse._SubParsersAction[Parser]) -> None:
    command = _command(
        commands,
        "bench",
        "measure NCCL's collectives, algorithms and protocols",
        "Measure one of NCCL's collectives over sizes and variants, or the communication of a "
        "model's plan; or compare two results.",
    )
    kinds = command.add_subparsers(title="what", metavar="WHAT", required=True)
    bench_words.add(partial(_command, kinds), _add_model)


def _add_doctor(commands: argparse._SubParsersAction[Parser]) -> None:
    command = _command(
        commands,
        "doctor",
        "say what is there and what cannot work",
        "Say which libraries and devices were found, which environment variables are in effect, "
        "and what cannot work and why. The exit code is 0 unless trlow itself is broken.",
    )
    command.add_argument("--json", action="store_true", help="print JSON instead of tables")
    command.set_defaults(run=doctor.run)
