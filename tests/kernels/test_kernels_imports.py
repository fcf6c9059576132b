"""Which modules an import of radixkv_kernels loads."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_neither_the_import_nor_the_torch_path_loads_triton() -> None:
    run(
        "import sys, torch, radixkv_kernels\n"
        "storage = torch.zeros(2, 1, 2, 1, 1, 1)\n"
        "radixkv_kernels.fork_blocks(storage, [0], [1], [1])\n"
        "assert radixkv_kernels.backend(storage) == 'torch'\n"
        "assert 'triton' not in sys.modules\n"
    )


@pytest.mark.slow
def test_only_the_reference_can_be_forced() -> None:
    run(
        "import os\n"
        "os.environ['RADIXKV_KERNELS'] = 'reference'; os.environ['TRITON_INTERPRET'] = '1'\n"
        "import sys, torch, radixkv_kernels\n"
        "storage = torch.ones(2, 1, 2, 1, 1, 1)\n"
        "radixkv_kernels.scrub(storage, [1])\n"
        "assert radixkv_kernels.backend(storage) == 'torch' and not storage[1].any()\n"
        "assert 'triton' not in sys.modules\n"
    )
    run(
        "import os; os.environ['RADIXKV_KERNELS'] = 'fast'\n"
        "import torch, radixkv_kernels\n"
        "try: radixkv_kernels.backend(torch.empty(1))\n"
        "except radixkv_kernels.InputError as error: assert 'RADIXKV_KERNELS' in str(error)\n"
        "else: raise AssertionError\n"
    )


@pytest.mark.slow
def test_a_device_without_triton_warns_once() -> None:
    run(
        "import warnings, torch, radixkv_kernels\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    for _ in range(3): assert radixkv_kernels.backend(torch.empty(1, device='meta')) == 'torch'\n"
        "assert [w.category for w in seen] == [RuntimeWarning] and 'meta' in str(seen[0].message)\n"
    )


def test_nothing_of_radixkv_is_imported() -> None:
    run(
        "import sys, radixkv_kernels, radixkv_kernels.copy_triton, radixkv_kernels.reorder_triton\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'radixkv']\n"
    )
