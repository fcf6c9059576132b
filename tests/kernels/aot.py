"""Compiles the kernels ahead of time, and prints one JSON object on a line for each configuration and target.

``test_aot.py`` runs it in a process without the interpreter. Run by hand, it gives the table of kernels/README.md:

  python tests/kernels/aot.py [--only copy/] [--chunk 1024 2048 4096 8192] [--num-warps 4 8]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radixkv_kernels import Beams, Pool, Quantized, copy_triton, quantize_triton, reorder_triton, scrub_triton

TARGETS = [("cuda", 80, 32), ("cuda", 90, 32), ("cuda", 100, 32), ("hip", "gfx942", 64)]

HAVE_E4M3 = TARGETS[1:3]


class Configuration(NamedTuple):
    """A kernel as a launch compiles it: the types of its arguments, its constants and its warps."""

    name: str
    kernel: Any
    arguments: dict[str, str | tuple[str, ...]]
    constants: dict[str, object]
    num_warps: int
    wide_bytes: int | None
    """The bytes that a program must move with 16-byte loads and stores. None if the rows are too odd for them."""
    targets: list[tuple[str, str | int, int]] | None = None
    """The targets that launch this kernel, if not all do."""


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor with a shape but no bytes, aligned like torch's allocations."""
    return torch.empty(shape, dtype=dtype, device="meta")


def layouts() -> dict[str, tuple[Pool, Pool, bool]]:
    """The source, the target, and whether all accesses should be wide, by name."""
    llama = Pool.of(meta(9, 32, 2, 16, 8, 128))
    hnd = Pool.of(meta(9, 1, 2, 8, 16, 128))  # the same bytes, with the strides of a transposed view
    hnd.geometry = hnd.geometry._replace(block_size=16, num_heads=8, row_stride=256, head_stride=4096)
    latent = Pool.of(meta(9, 61, 1, 16, 1, 576))
    floats = Pool.of(meta(9, 32, 2, 16, 8, 128, dtype=torch.float32))
    one = Pool.of(meta(9, 1, 2, 16, 8, 128))
    small = Pool.of(meta(9, 2, 2, 16, 1, 8))
    odd = Pool.of(meta(9, 2, 2, 5, 1, 3, dtype=torch.int8))
    return {
        "llama-3-8b": (llama, llama, True),
        "hnd": (hnd, hnd, True),
        "hnd-to-staging": (hnd, one, True),
        "staging-to-hnd": (one, hnd, True),
        "deepseek-latent": (latent, latent, True),
        "bf16-to-fp32": (llama, floats, False),
        "fp32-to-bf16": (floats, llama, False),
        "rows-of-16-bytes": (small, small, False),
        "rows-of-3-bytes": (odd, odd, False),
    }


def copies(chunks: list[int]) -> Iterator[Configuration]:
    for layout, (source, target, is_wide) in layouts().items():
        for chunk in chunks:
            shape = copy_triton.copy_shape(source, target, chunk)
            constants = shape._asdict()
            wide = 4 * shape.CHUNK if is_wide else None
            strides = {"read_planes": shape.READ_PLANE, "write_planes": shape.WRITE_PLANE}
            planes = {name: "i64" if stride else "*i64" for name, stride in strides.items()}
            few, many = copy_triton.copy_few_kernel, copy_triton.copy_kernel
            table = {"pairs": "*i32", "num_chunks": "i32"}
            kinds = [("copy", many, planes | table, shape.num_warps())]
            if layout in ("llama-3-8b", "hnd", "rows-of-3-bytes"):
                for num_pairs, most in copy_triton.FEW.items():
                    columns = dict.fromkeys(("sources", "targets", "num_rows"), ("i32",) * num_pairs)
                    kinds.append((f"few/{num_pairs}", few, planes | columns, shape.num_warps(most)))
            for name, kernel, arguments, warps in kinds:
                yield Configuration(f"{name}/{layout}/{chunk}", kernel, arguments, constants, warps, wide)


def scrubs() -> Iterator[Configuration]:
    kernel = scrub_triton.scrub_kernel
    for layout, (pool, _, is_wide) in layouts().items():
        if layout in ("llama-3-8b", "hnd", "deepseek-latent", "rows-of-3-bytes"):
            shape = copy_triton.copy_shape(pool, pool)
            constants = dict(zip(kernel.arg_names[2:], scrub_triton.constants(pool), strict=True))
            wide = 4 * shape.CHUNK if is_wide else None
            arguments = {"planes": "*i64", "block_ids": "*i32"}
            yield Configuration(f"scrub/{layout}", kernel, arguments, constants, shape.num_warps(), wide)


def quantisers() -> Iterator[Configuration]:
    llama = Pool.of(meta(9, 32, 2, 16, 8, 128))
    arguments = {"planes": "*i64", "block_ids": "*i32", "records": "*u8"}
    for scheme, pool, is_native in [
        ("fp8", llama, True),
        ("fp8", llama, False),
        ("int8", llama, False),
        ("int4", llama, False),
        ("int4", Pool.of(meta(9, 61, 1, 16, 1, 576)), False),
        ("int8", Pool.of(meta(9, 2, 2, 5, 1, 6, dtype=torch.float16)), False),
    ]:
        form = Quantized(pool, scheme)
        name = f"{scheme}{'-native' * is_native}/{pool.geometry.head_dim}"
        sides = (
            (quantize_triton.quantizing_constants, quantize_triton.quantizing_warps),
            (quantize_triton.constants, quantize_triton.dequantizing_warps),
        )
        for verb, (constants, warps) in zip(("quantize", "dequantize"), sides, strict=True):
            kernel = getattr(quantize_triton, f"{verb}_kernel")
            fixed = constants(form, is_native=is_native)
            targets = (
                None
                if scheme != "fp8"
                else [target for target in TARGETS if (target in HAVE_E4M3) == is_native]
            )
            yield Configuration(f"{verb}/{name}", kernel, arguments, fixed, warps(form), None, targets)


def reorders() -> Iterator[Configuration]:
    """A step of four beams of a short search and of 64 beams of 32k tokens, with and without history."""
    pool = Pool.of(meta(9, 32, 2, 16, 8, 128))
    for num_beams, columns, max_steps in ((4, 80, 0), (4, 80, 256), (64, 2064, 0), (64, 2064, 4096)):
        beams = Beams(
            [[]] * num_beams,
            [0] * num_beams,
            [0] * num_beams,
            [0],
            num_blocks=9,
            block_size=16,
            max_columns=columns,
            max_steps=max_steps,
        )
        shape = f"{num_beams}x{columns}" + "-remembered" * (max_steps > 0)
        finish = reorder_triton.finish_constants(beams, pool, 1056)
        permute = reorder_triton.permute_warps(beams)
        for name, kernel, constants, warps, wide in (
            ("plan", reorder_triton.plan_kernel, reorder_triton.plan_constants(beams), 4, None),
            (
                "permute",
                reorder_triton.permute_kernel,
                reorder_triton.permute_constants(beams),
                permute,
                None,
            ),
            ("finish", reorder_triton.finish_kernel, finish, 4, 4 * finish["CHUNK"]),
        ):
            arguments = {name: "*i32" for name in kernel.arg_names if name.islower()}
            if "planes" in arguments:
                arguments["planes"] = "i64"  # for block-major storage
            if max_steps and "token_ids" in arguments:
                arguments["token_ids"] = "*i64"
            yield Configuration(f"{name}/{shape}", kernel, arguments, constants, warps, wide)


def compiled(configuration: Configuration, target: tuple[str, str | int, int], num_warps: int) -> Any:
    """The kernel as a launch with 16-byte aligned pointers compiles it."""
    arguments, constants = configuration.arguments, configuration.constants
    pointers = [index for index, kind in enumerate(arguments.values()) if kind[0] == "*"]
    source = ASTSource(
        fn=configuration.kernel,
        signature={**arguments, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
        attrs={(index,): [["tt.divisibility", 16]] for index in pointers},
    )
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget(*target), options=options)


def cuda_resources(cubin: bytes) -> dict[str, int] | None:
    """The registers, and the bytes of stack and local memory, where spills go. None if triton has no cuobjdump."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name.lower(): int(re.search(rf"\b{name}:(\d+)", report)[1]) for name in ("REG", "STACK", "LOCAL")}


def facts(kernel: Any, target: tuple[str, str | int, int]) -> dict[str, object]:
    if target[0] == "hip":
        code = kernel.asm["amdgcn"]
        return {
            "code_bytes": len(kernel.asm["hsaco"]),
            "wide_loads": len(re.findall(r"\b(?:global|buffer|flat)_load_dwordx4\b", code)),
            "wide_stores": len(re.findall(r"\b(?:global|buffer|flat)_store_dwordx4\b", code)),
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


def configurations(chunks: list[int]) -> Iterator[Configuration]:
    yield from copies(chunks)
    yield from scrubs()
    yield from quantisers()
    yield from reorders()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="configurations whose name begins so")
    parser.add_argument("--chunk", type=int, nargs="*", default=[copy_triton.CHUNK])
    parser.add_argument("--num-warps", type=int, nargs="*")
    options = parser.parse_args()
    for configuration in configurations(options.chunk):
        if not configuration.name.startswith(options.only):
            continue
        for num_warps in options.num_warps or [configuration.num_warps]:
            for target in TARGETS:
                if configuration.targets is not None and target not in configuration.targets:
                    continue
                line = {
                    "name": configuration.name,
                    "target": target,
                    "num_warps": num_warps,
                    "wide_bytes": configuration.wide_bytes,
                }
                print(json.dumps(line | facts(compiled(configuration, target, num_warps), target)))


if __name__ == "__main__":
    main()
