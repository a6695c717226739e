"""At which size do two ranks sum faster by copy engines than by NCCL's all-reduce?

    python bench/copies.py [--gpus 0-1] [--rounds 60] [--calls 20] [--most BYTES] [--json FILE]
    python bench/copies.py --device host --rounds 3 --most 262144    (a dry run)

How it is measured: ways.py. "all_reduce" is NCCL's. "exchange" is a whole sum of trlow.exchange:
ranks meet, copy, meet, and add; both GPUs copy at once. "sent" leaves the addition out, which an
optimizer's kernel does anyway, "met" the copy as well: where ranks meet for many sums, what "sent"
has beyond it is what a sum costs.
"""

from __future__ import annotations

from functools import partial

import report
import ways

from trlow.dtype import F32
from trlow.exchange import add, admit, receive, send
from trlow.plan import MemoryPlan, PlanBuilder
from trlow.program import Stage, Stream
from trlow.range_op import sum_all_reduce
from trlow.region import Region, RegionTable
from trlow.runtime import Runtime

SIZES = (4, 64 * ways.KI, ways.MI, 4 * ways.MI, 25 * ways.MI, 100 * ways.MI, 512 * ways.MI)

RIVALS = ("all_reduce", "exchange")


def plan_of(nbytes: int) -> MemoryPlan:
    """A buffer, what the other rank sends, and the token by which ranks meet."""
    regions = (
        Region("BUFFER", F32, "what is summed"),
        Region("INBOX", F32, "the other rank's"),
        Region("TOKEN", F32, "by which ranks meet"),
    )
    builder = PlanBuilder(RegionTable("copies", regions))
    builder.add("BUFFER", "buffer", (nbytes // F32.itemsize,))
    builder.add("INBOX", "inbox", (nbytes // F32.itemsize,))
    builder.add("TOKEN", "token", (1,))
    return builder.build()


def sums(calls: int, runtime: Runtime, nbytes: int) -> dict[str, list[Stage]]:
    """As many sums, or parts of them, for each way."""
    span, inbox = (ways.span_of(runtime, name, nbytes) for name in ("buffer", "inbox"))
    token = runtime.plan.range("token")
    first, last = admit(token, inbox), receive(token, inbox)
    copy, whole = send(inbox, span), add(span, inbox)
    return {
        name: [Stage("SUMS", Stream.UPDATE, ops)]
        for name, ops in (
            ("all_reduce", (sum_all_reduce(span),) * calls),
            ("exchange", (first, copy, last, whole) * calls),
            ("sent", (first, copy, last) * calls),
            ("met", (first, last) * calls),
        )
    }


def main() -> None:
    made = ways.parser(__doc__, SIZES)
    made.set_defaults(gpus="0-1")
    arguments = made.parse_args()
    sizes = [nbytes for nbytes in SIZES if nbytes <= arguments.most]
    settings = report.settings_of(arguments, **ways.quiet(arguments))
    if len(settings.devices(64)) != 2:
        made.error("--gpus: two, such as 0-1")
    with Runtime(settings, plan_of(max(sizes))) as runtime:
        sides = [ways.Side("plain", runtime, arguments.calls)]
        ways.run(arguments, sides, partial(sums, arguments.calls), sizes, RIVALS)


if __name__ == "__main__":
    main()
