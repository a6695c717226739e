"""PyTorch modules trained by static data parallelism. Needs the extra ``torch``.

PyTorch computes; trlow plans, captures, communicates and replays. Each rank's forward, backward and
optimizer step are captured on the rank's own thread, gradients are gathered into byte ranges and
reduced beside the rest of the backward, and a step is one graph launch for each GPU.

    batches -> buckets -> stages -> parallel       what is static, from a batch to a program
    work, member, update                           the torch work of one rank
    cuda, host                                     how it gets onto streams
"""

from trlow.torch.loss import Loss
from trlow.torch.parallel import StaticDataParallel
from trlow.torch.views import tensor_of

__all__ = ["Loss", "StaticDataParallel", "tensor_of"]
