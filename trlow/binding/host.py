"""The host device: one shared library that answers as CUDA runtime, driver and NCCL.

`load` gives its four tables over the one file, loaded RTLD_LOCAL so that a real libcudart in the
process is not disturbed. PROTOTYPES are its own extensions; every one that returns
trlowHostStatus_t returns 0 or a cudaError code, the others return what they count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trlow.binding import clib, cudart, driver, nccl

if TYPE_CHECKING:
    from trlow.binding.clib import Library

TYPES = """
typedef int trlowHostStatus_t;
"""

PROTOTYPES = """
trlowHostStatus_t trlowHostConfigure(int devices, int workers, unsigned long long seed,
    long long device_nbytes);
trlowHostStatus_t trlowHostKernelMode(int mode);
trlowHostStatus_t trlowHostFail(const char* function, long long nth, int code);
long long trlowHostCalls(const char* function);
int trlowHostLive(const char* what);
trlowHostStatus_t trlowHostIssuerEnter(void);
trlowHostStatus_t trlowHostIssuerLeave(void);
trlowHostStatus_t trlowHostProgressTimeout(int milliseconds);
"""
