"""What importing radixkv_kernels brings along."""

from __future__ import annotations

import subprocess
import sys


def run(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_neither_the_import_nor_the_torch_path_brings_triton() -> None:
    run(
        "import sys, torch, radixkv_kernels\n"
        "storage = torch.zeros(2, 1, 2, 1, 1, 1)\n"
        "radixkv_kernels.fork_blocks(storage, [0], [1], [1])\n"
        "assert radixkv_kernels.backend(storage) == 'torch'\n"
        "assert 'triton' not in sys.modules\n"
    )


def test_nothing_of_radixkv_is_imported() -> None:
    run(
        "import sys, radixkv_kernels, radixkv_kernels.copy_triton\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'radixkv']\n"
    )
