"""Fuzzes the reader of programs: `python tests/ffi/fuzzing.py SECONDS`, with libFuzzer where clang has one."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import ffi_programs as made
import msgpack
import native

SANITIZERS = "address,undefined"


def corpus(folder: Path) -> Path:
    """Sound payloads with every kind of step, one artifact, and an object."""
    immediates = [["immediate", [dtype, 3]] for dtype in ("int32", "int64")]
    immediates += [["immediate", [dtype, -0.5]] for dtype in ("float32", "float64")]
    operands = [made.buffer("float32", 2, 4), made.buffer("bfloat16", 3), made.buffer("uint8", 0, 7)]
    host = made.host("touch", ["operand", 0], ["workspace", 256], *immediates)
    fill = {"kind": "fill", "dest": ["workspace", 0], "value": 1, "width": 4, "bytes": 64}
    cuda = {"platform": "cuda", "arch": 90, "cudnn": 91900, "cutedsl": "4.8.1", "workspace": 1024}
    graph = '{"version":1,"io_data_type":null,"intermediate_data_type":null,"compute_data_type":null,"tensors":[],'
    graph += '"nodes":[],"inputs":[],"outputs":[]}'
    payloads = {
        "host": made.payload(operands, operands[:1], [made.fill(3, 7, 32), host, fill], workspace=600),
        "kernels": made.payload(operands[:1], operands[:1], [made.cubin(), made.cute()], **cuda),
        "cudnn": made.payload(operands[:1], operands[:1], [made.cudnn(graph=graph, plan=plan())], **cuda),
    }
    extension = made.cudnn(graph=graph, plan=msgpack.ExtType(1, plan()))
    payloads["extension"] = made.payload(operands[:1], operands[:1], [extension], **cuda)
    for name, payload in payloads.items():
        (folder / name).write_bytes(msgpack.packb(payload))
    (folder / "artifact").write_bytes(made.seal(payloads["host"]))
    source = native.HERE / "cute_object.c"
    subprocess.run(["cc", "-c", "-O1", "-fPIC", "-o", folder / "object", source], check=True)
    return folder


def plan() -> bytes:
    """A cuDNN plan with a row in each of its lists, whose two callers are uids 1 and 2."""
    packed: bytes = msgpack.packb(
        {
            "version": 1,
            "cudnn": 91900,
            "backend": b"plan",
            "workspace": 512,
            "backend_workspace": 256,
            "uids": [1, 2, 7, 8, 9],
            "caller": [0, 1],
            "scalars": [[2, b"\0\0\x80?"]],
            "scratch": [[3, 0]],
            "aliases": [[4, 0, 4]],
            "clears": [[0, 16]],
            "uploads": [[16, b"1234"]],
        }
    )
    return packed


def own(folder: Path) -> Callable[[int], str]:
    """Builds with g++ and the driver beside this file; what runs it for some seconds and returns its figures."""
    build = native.Build(folder, [*native.checked(SANITIZERS), "-O1"])
    # It looks through a map after each input, which a sanitizer makes slower than the input itself.
    driver = build.compile("driver", [native.HERE / "fuzz_driver.cc"], "-O2", "-fno-sanitize=all")
    build.options += ["-fsanitize-coverage=trace-pc", "-DCUDNN_JAX_WITH_CUDNN"]
    binary = build.program("fuzz_program.cc", build.core, build.cudnn, driver, headers=native.CUDNN_HEADERS)
    return functools.partial(_run, binary, lambda seconds, seeds: [seconds, seeds], r"\d+ executions.*")


def libfuzzer(folder: Path) -> Callable[[int], str] | None:
    """The same with clang's libFuzzer; None where there is none."""
    if shutil.which("clang++") is None:
        return None
    probe = folder / "probe.cc"
    probe.write_text(
        "#include <cstdint>\n#include <cstddef>\n"
        + 'extern "C" int LLVMFuzzerTestOneInput(const uint8_t*, size_t) { return 0; }'
    )
    command = ["clang++", "-fsanitize=fuzzer", probe, "-o", folder / "probe"]
    if subprocess.run(command, capture_output=True).returncode:
        return None
    options = ["-O1", f"-fsanitize=fuzzer-no-link,{SANITIZERS}", "-fno-sanitize-recover=all", "-DCUDNN_JAX_WITH_CUDNN"]
    build = native.Build(folder, options, "clang++")
    binary = build.program(
        "fuzz_program.cc", build.core, build.cudnn, "-fsanitize=fuzzer", headers=native.CUDNN_HEADERS
    )

    def arguments(seconds: int, seeds: Path) -> list[object]:
        return [f"-max_total_time={seconds}", "-max_len=65536", "-print_final_stats=1", "-rss_limit_mb=4096", seeds]

    return functools.partial(_run, binary, arguments, r"stat::number_of_executed_units: \d+")


def _run(binary: Path, arguments: Callable[[int, Path], list[object]], figures: str, seconds: int) -> str:
    folder = Path(tempfile.mkdtemp(dir=binary.parent))
    seeds = folder / "corpus"
    seeds.mkdir()
    command = [str(part) for part in (binary, *arguments(seconds, corpus(seeds)))]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds + 120)
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{output[-6000:]}\nthe input is in {folder}"
    found = re.search(figures, output)
    assert found, output[-2000:]
    return found[0]


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="cudnn_jax_fuzz_"))
    run = libfuzzer(folder)
    print("libFuzzer" if run else "no clang with libFuzzer here: our own driver", flush=True)
    print((run or own(folder))(int(sys.argv[1])))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
