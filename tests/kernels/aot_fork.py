"""Compiles fork_blocks' kernel ahead of time and prints one JSON object a (target, layout) as a line.

Run by ``test_fork_aot.py`` in a process that doesn't interpret. By hand it is the table of kernels/README.md:

    python tests/kernels/aot_fork.py [--chunk-words 1024 2048 4096 8192] [--num-warps 4 8]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radixkv_kernels import fork_triton

TARGETS = [("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)]
# name: block storage of one block on "meta", which has a shape and no bytes
LAYOUTS = {
    "llama-3-8b": torch.empty((1, 32, 2, 16, 8, 128), dtype=torch.bfloat16, device="meta"),
    "llama-3-8b-fp8": torch.empty((1, 32, 2, 16, 8, 128), dtype=torch.float8_e4m3fn, device="meta"),
    "rows-of-16-bytes": torch.empty((1, 2, 2, 16, 1, 8), dtype=torch.float16, device="meta"),
    "rows-of-3-bytes": torch.empty((1, 2, 2, 5, 1, 3), dtype=torch.int8, device="meta"),
}
CONSTANTS = ("ROW_WORDS", "PLANE_WORDS", "NUM_PLANES", "CHUNK_WORDS")


def compiled(shape: fork_triton.Geometry, target: tuple[str, str | int, int], num_warps: int):
    """The kernel as a launch on 16-byte aligned storage of this geometry would compile it."""
    aligned = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=fork_triton.fork_kernel,
        signature={
            "words": "*i32" if shape.word_bytes == 4 else "*i8",
            "table": "*i32",
            **dict.fromkeys(CONSTANTS, "constexpr"),
        },
        constexprs=dict(zip(CONSTANTS, shape[1:], strict=True)),
        attrs={(0,): aligned, (1,): aligned},
    )
    return triton.compile(source, target=GPUTarget(*target), options={"num_warps": num_warps})


def cuda_resources(cubin: bytes) -> dict[str, int] | None:
    """Registers and bytes of stack and local memory (where spills go); None without triton's cuobjdump."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name.lower(): int(re.search(rf"\b{name}:(\d+)", report)[1]) for name in ("REG", "STACK", "LOCAL")}


def facts(kernel, target: tuple[str, str | int, int]) -> dict[str, object]:
    if target[0] == "hip":
        code = kernel.asm["amdgcn"]
        return {
            "code_bytes": len(kernel.asm["hsaco"]),
            "wide_loads": len(re.findall(r"\b(?:global|buffer)_load_dwordx4\b", code)),
            "wide_stores": len(re.findall(r"\b(?:global|buffer)_store_dwordx4\b", code)),
            "registers": int(re.search(r"\.vgpr_count:\s*(\d+)", code)[1]),
            "spilled": sum(int(count) for count in re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", code)),
        }
    ptx, resources = kernel.asm["ptx"], cuda_resources(kernel.asm["cubin"])
    return {
        "code_bytes": len(kernel.asm["cubin"]),
        "wide_loads": ptx.count("ld.global.v4.b32"),
        "wide_stores": ptx.count("st.global.v4.b32"),
        "registers": resources and resources["reg"],
        "spilled": resources and resources["stack"] + resources["local"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunk-words", type=int, nargs="*")
    parser.add_argument("--num-warps", type=int, nargs="*")
    options = parser.parse_args()
    for name, storage in LAYOUTS.items():
        default = fork_triton.geometry(storage)
        for chunk_words in options.chunk_words or [default.chunk_words]:
            shape = default._replace(chunk_words=chunk_words)
            for num_warps in options.num_warps or [shape.num_warps]:
                for target in TARGETS:
                    facts_of = facts(compiled(shape, target, num_warps), target)
                    line = {
                        "layout": name,
                        "target": target,
                        "geometry": shape._asdict(),
                        "num_warps": num_warps,
                    }
                    print(json.dumps(line | facts_of))


if __name__ == "__main__":
    main()
