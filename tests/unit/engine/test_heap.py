"""The allocator keeps what a step frees; looked at in a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="the allocator is not glibc's"
)

SCRIPT = """
import resource
import threading

import torch

from samestep.engine.heap import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def steps():
    for _ in range(12):
        before = faults()
        held = [torch.ones(2048, 2048) for _ in range(3)]
        passing = torch.ones(1024, 2048)
        del passing, held
        found.append(faults() - before)

torch.set_num_threads(1)
assert keep_freed_memory()
found = []
thread = threading.Thread(target=steps)
thread.start()
thread.join()
print(max(found[-4:]))
"""


def test_a_step_takes_no_page_faults_for_what_the_one_before_freed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60
    )
    # Three blocks of 16 MB and one of 8 MB would take 14,000.
    assert int(done.stdout) < 100
