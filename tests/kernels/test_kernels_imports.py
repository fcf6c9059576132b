"""Which modules an import of radixkv_kernels loads, and how a process chooses its path. Torch is dear to import."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHOICE = """
import sys, warnings, torch, radixkv_kernels
storage = torch.zeros(2, 1, 2, 1, 1, 1)
radixkv_kernels.fork_blocks(storage, [0], [1], [1])
assert radixkv_kernels.backend(storage) == 'torch'
assert 'triton' not in sys.modules, "neither the import nor the torch path loads triton"
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter('always')
    for _ in range(3): assert radixkv_kernels.backend(torch.empty(1, device='meta')) == 'torch'
assert [w.category for w in seen] == [RuntimeWarning] and 'meta' in str(seen[0].message), "one warning for a device"
import radixkv_kernels.copy_triton, radixkv_kernels.reorder_triton
assert not [name for name in sys.modules if name.split('.')[0] == 'radixkv'], "nothing of radixkv is imported"
"""
FORCED = """
import os, sys, torch, radixkv_kernels
os.environ['TRITON_INTERPRET'] = '1'
storage = torch.ones(2, 1, 2, 1, 1, 1)
os.environ['RADIXKV_KERNELS'] = 'fast'
try: radixkv_kernels.backend(storage)
except radixkv_kernels.InputError as error: assert 'RADIXKV_KERNELS' in str(error)
else: raise AssertionError("only the reference can be forced")
os.environ['RADIXKV_KERNELS'] = 'reference'
radixkv_kernels.scrub(storage, [1])
assert radixkv_kernels.backend(storage) == 'torch' and not storage[1].any()
assert 'triton' not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [CHOICE, FORCED], ids=["choice", "forced"])
def test_what_is_loaded_and_chosen(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
