"""What a process sees that leaves without tidying up, or that forks."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import pytest

pytestmark = pytest.mark.timeout(60)

ALIVE = """
import ctypes, sys, threading, time
from ctypes import byref, c_void_p
from trlow.binding import host

libs = host.load()
cuda, nccl = libs.cudart, libs.nccl
comms = (c_void_p * 2)()
nccl.ncclCommInitAll(comms, 2, None)
pointer, stream, graph, exec_ = c_void_p(), c_void_p(), c_void_p(), c_void_p()
cuda.cudaMalloc(byref(pointer), 1 << 20)
cuda.cudaStreamCreateWithFlags(byref(stream), 1)
cuda.cudaStreamBeginCapture(stream, 1)
cuda.cudaMemsetAsync(pointer, 1, 1 << 20, stream)
nccl.ncclAllReduce(pointer, pointer, 4, 7, 0, comms[0], stream)
cuda.cudaStreamEndCapture(stream, byref(graph))
cuda.cudaGraphInstantiate(byref(exec_), graph, 0)
cuda.cudaGraphLaunch(exec_, stream)  # its peer never comes
busy = c_void_p()
cuda.cudaStreamCreateWithFlags(byref(busy), 1)
callback = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: time.sleep(0.001))
for _ in range(20000):
    cuda.cudaLaunchHostFunc(busy, callback, None)  # workers run Python while the process ends
def wait():
    libs.host.trlowHostIssuerEnter()
    cuda.cudaStreamSynchronize(stream)
for _ in range(3):
    threading.Thread(target=wait, daemon=True).start()
time.sleep(0.3)
"""

ENDINGS = {
    "end of script": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "exception": ("raise SystemExit('')", 1),
}


def run(code, timeout=30):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


@pytest.mark.parametrize("name", ENDINGS)
def test_a_process_ends_at_once_with_everything_alive(name):
    ending, expected = ENDINGS[name]
    start = time.monotonic()
    done = run(ALIVE + ending)
    assert (done.returncode, done.stderr.strip(), done.stdout) == (expected, "", "")
    assert time.monotonic() - start < 10


def test_a_callback_that_outlives_the_interpreter_makes_no_noise():
    for _ in range(3):
        done = run(
            """
            import ctypes, time
            from ctypes import byref, c_void_p
            from trlow.binding import host
            cuda = host.load().cudart
            stream = c_void_p()
            cuda.cudaStreamCreateWithFlags(byref(stream), 1)
            callback = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: time.sleep(0.02))
            for _ in range(1000):
                cuda.cudaLaunchHostFunc(stream, callback, None)
            """
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_after_a_fork_every_call_says_so_and_the_parent_goes_on():
    done = run(
        """
        import os, warnings
        from ctypes import byref, c_int, c_void_p
        from trlow.binding import host
        from trlow.errors import ForeignError
        warnings.simplefilter("ignore")
        libs = host.load()
        stream = c_void_p()
        libs.cudart.cudaStreamCreateWithFlags(byref(stream), 1)
        def code(function, *arguments):
            try:
                return function(*arguments)
            except ForeignError as error:
                return error.code
        child = os.fork()
        if child == 0:
            codes = [
                code(libs.cudart.cudaStreamSynchronize, stream),
                code(libs.cudart.cudaGetDevice, byref(c_int())),
                code(libs.driver.cuInit, 0),
                code(libs.nccl.ncclGroupStart),
                code(libs.host.trlowHostConfigure, 4, 0, 0, 0),
                libs.host.trlowHostLive(b"streams"),
            ]
            said = libs.nccl.ncclGetLastError(None).decode()
            os._exit(0 if codes == [3, 3, 3, 2, 3, -1] and "fork" in said else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        libs.cudart.cudaStreamSynchronize(stream)
        libs.cudart.cudaStreamDestroy(stream)
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_real_cuda_runtime_in_the_process_is_not_disturbed():
    """The library exports its names to nobody: the process's own cudaMalloc stays undefined."""
    done = run(
        """
        import ctypes
        from trlow.binding import host
        libs = host.load()
        try:
            ctypes.CDLL(None).cudaMalloc
        except AttributeError:
            pass
        else:
            raise SystemExit("cudaMalloc became visible to the process")
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
