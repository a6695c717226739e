"""PyTorch modules trained by static data parallelism. Needs the extra ``torch``.

PyTorch computes; trlow plans, captures, communicates and replays. Each rank's forward, backward and
optimizer step are captured on the rank's own thread, gradients are gathered into byte ranges and
reduced beside the rest of the backward, and a step is one graph launch for each GPU.

    measure -> course -> blueprint -> stages    what is static, from an example batch to a program
    work, member, update, fused, rows           the torch work of one rank
    cuda, host                                  how it gets onto streams
    parallel                                    what a caller sees of all this
"""

from trlow.torch.loss import Loss
from trlow.torch.parallel import StaticDataParallel
from trlow.torch.views import tensor_of

__all__ = ["Loss", "StaticDataParallel", "tensor_of"]
