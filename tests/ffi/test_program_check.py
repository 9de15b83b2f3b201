"""Artifacts as the C++ side reads them: what is right passes, everything else is one clean line."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import msgpack
import pytest
from ffi_programs import Payload, buffer, cubin, cudnn, cute, fill, host, payload, seal
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_jax import _ffi, _program

SPEC = json.loads(_ffi.PROGRAM_SPEC)
CPU = payload(
    inputs=[buffer("bfloat16", 2, 3), buffer("float32")],
    outputs=[buffer("float32", 4)],
    steps=[
        fill(2, 255, 16),
        host("f", ["operand", 0], ["workspace", 256], ["immediate", ["float32", 0.5]], ["immediate", ["int64", -3]]),
        {"kind": "fill", "dest": ["workspace", 256], "value": 0, "width": 1, "bytes": 256},
    ],
    workspace=512,
)
CUDA = payload(
    inputs=[buffer("float16", 8)],
    outputs=[buffer("float16", 8)],
    steps=[cudnn()],
    workspace=512,
    platform="cuda",
    arch=90,
    cudnn=91900,
)
KERNELS = payload(
    inputs=[buffer("float32", 8)],
    outputs=[buffer("float32", 8)],
    steps=[cubin(), cute()],
    workspace=512,
    platform="cuda",
    arch=90,
    cutedsl="4.8.1",
)


def problem(artifact: bytes) -> str:
    with pytest.raises(ValueError) as raised:
        _ffi.program_check(artifact)
    text = str(raised.value)
    assert text and "\n" not in text and len(text) < 400
    return text


def test_a_sound_program_is_summarised() -> None:
    artifact = seal(CPU)
    assert _ffi.program_check(artifact) == {
        "platform": "cpu",
        "arch": None,
        "cudnn": None,
        "cutedsl": None,
        "sha256": hashlib.sha256(msgpack.packb(CPU)).hexdigest(),
        "inputs": [{"dtype": "bfloat16", "shape": (2, 3)}, {"dtype": "float32", "shape": ()}],
        "outputs": [{"dtype": "float32", "shape": (4,)}],
        "workspace": 512,
        "steps": ["fill", "host", "fill"],
    }


def test_the_hash_is_sha256_for_every_length_of_the_last_block() -> None:
    for length in range(1, 131):
        content = payload(steps=[host("x" * length)])
        assert _ffi.program_check(seal(content))["sha256"] == hashlib.sha256(msgpack.packb(content)).hexdigest()


@pytest.mark.parametrize("dtype", SPEC["dtypes"])
def test_every_dtype_of_the_layout_is_known(dtype: str) -> None:
    count = math.ceil(3 * SPEC["dtypes"][dtype] / 8)
    content = payload(outputs=[buffer(dtype, 3)], steps=[fill(0, 1, count)])
    assert _ffi.program_check(seal(content))["outputs"] == [{"dtype": dtype, "shape": (3,)}]
    content["steps"][0]["bytes"] = count + 1
    assert problem(seal(content)) == f"payload.steps[0].dest: bytes is {count + 1}, the buffer has {count}"


def test_an_empty_buffer_may_have_any_other_dimensions() -> None:
    content = payload(outputs=[buffer("float64", 0, 2**40, 2**40)], steps=[fill(0, 0, 0)])
    assert _ffi.program_check(seal(content))["outputs"][0]["shape"] == (0, 2**40, 2**40)


def changed(content: Payload, path: tuple[Any, ...], value: Any) -> Payload:
    content = copy.deepcopy(content)
    inner: Any = content
    for key in path[:-1]:
        inner = inner[key]
    if value is DELETE:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return content


DELETE = object()
EXTENSION = "not valid MessagePack, an extension type where the rule is binary"
BAD_FIELDS: list[tuple[Payload, tuple[Any, ...], Any, str]] = [
    (CPU, ("requires",), DELETE, "payload.requires: missing"),
    (CPU, ("requires",), [1], "payload.requires: expected a map, got [1]"),
    (CPU, ("requires", "platform"), "tpu", 'payload.requires.platform: got "tpu", the rule is one of'),
    (CPU, ("requires", "arch"), -90, "payload.requires.arch: got -90, the rule is 1 <= arch <= 2147483647"),
    (CPU, ("requires", "arch"), "90", 'payload.requires.arch: expected an integer, got "90"'),
    (CPU, ("inputs",), None, "payload.inputs: expected a list, got null"),
    (CPU, ("inputs",), [buffer("int8")] * 65, "payload.inputs: has 65 entries, the rule is at most 64"),
    (CPU, ("outputs",), [buffer("int8")] * 63, "payload.outputs: inputs and outputs together are 65"),
    (CPU, ("inputs", 0, "dtype"), "float33", 'payload.inputs[0].dtype: got "float33"'),
    (CPU, ("inputs", 0, "shape"), [2] * 17, "payload.inputs[0].shape: has 17 entries"),
    (CPU, ("inputs", 0, "shape", 1), -1, "payload.inputs[0].shape[1]: got -1"),
    (CPU, ("inputs", 0, "shape", 1), 2**63, "payload.inputs[0].shape[1]: got 9223372036854775808"),
    (CPU, ("inputs", 0, "shape", 1), 2.0, "payload.inputs[0].shape[1]: expected an integer, got 2.0"),
    (CPU, ("inputs", 0, "shape"), [2**40, 2**40], "payload.inputs[0].shape: the buffer is over the limit"),
    (CPU, ("inputs", 0, "strides"), [1], 'payload.inputs[0]: unknown field "strides"'),
    (CPU, ("workspace",), -1, "payload.workspace: got -1"),
    (CPU, ("workspace",), 256, "payload.steps[1].args[1]: workspace offset 256, the rule is a multiple"),
    (CPU, ("steps",), {}, "payload.steps: expected a list, got {}"),
    (CPU, ("steps",), [fill(2, 0, 0)] * 65, "payload.steps: has 65 entries"),
    (CPU, ("steps", 1), "host", 'payload.steps[1]: expected a map, got "host"'),
    (CPU, ("steps", 1, "kind"), DELETE, "payload.steps[1].kind: missing"),
    (CPU, ("steps", 1, "kind"), "ptx", 'payload.steps[1].kind: got "ptx", the rule is one of fill, cubin, cute,'),
    (CPU, ("steps", 1, "kind"), "fill", "payload.steps[1].value: missing"),
    (CPU, ("steps", 0, "bytes"), DELETE, "payload.steps[0].bytes: missing"),
    (CPU, ("steps", 0, "bytes"), None, "payload.steps[0].bytes: expected an integer"),
    (CPU, ("steps", 0, "width"), 2, "payload.steps[0].width: got 2, the rule is 1 or 4"),
    (CPU, ("steps", 0, "value"), 256, "payload.steps[0].value: got 256, the rule is at most 255 at width 1"),
    (CPU, ("steps", 0), fill(2, 1, 15, 4), "payload.steps[0].bytes: got 15, the rule is a multiple of width 4"),
    (CUDA, ("steps", 0, "pinned"), 1, "payload.steps[0].pinned: expected true or false, got 1"),
    (CUDA, ("steps", 0, "uids"), DELETE, "payload.steps[0].uids: missing"),
    (CUDA, ("steps", 0, "uids"), 2, "payload.steps[0].uids: expected a list"),
    (CPU, ("steps", 1, "symbol"), "", "payload.steps[1].symbol: text of 0 bytes"),
    (CPU, ("steps", 1, "symbol"), "s" * 1025, "payload.steps[1].symbol: text of 1025 bytes"),
    (CPU, ("steps", 1, "symbol"), "a b", 'payload.steps[1].symbol: got "a b", the rule is printable ASCII, no spaces'),
    (CPU, ("steps", 1, "symbol"), "a\0", 'payload.steps[1].symbol: got "a\\u0000", the rule is printable ASCII'),
    (CPU, ("steps", 1, "symbol"), b"s", "payload.steps[1].symbol: expected text, got binary of 1 bytes"),
    (CPU, ("steps", 1, "args"), [["operand", 0]] * 193, "payload.steps[1].args: has 193 entries"),
    (CPU, ("steps", 1, "args", 0), ["operand", 3], "payload.steps[1].args[0]: operand 3, the program has 3"),
    (CPU, ("steps", 1, "args", 0), ["operand", -1], "payload.steps[1].args[0]: operand -1"),
    (CPU, ("steps", 1, "args", 0), ["operand", 0.5], "payload.steps[1].args[0]: got ["),
    (CPU, ("steps", 1, "args", 0), ["register", 0], 'payload.steps[1].args[0]: got "register"'),
    (CPU, ("steps", 1, "args", 0), ["operand"], "payload.steps[1].args[0]: got ["),
    (CPU, ("steps", 1, "args", 1), ["workspace", 8], "payload.steps[1].args[1]: workspace offset 8"),
    (CPU, ("steps", 1, "args", 1), ["workspace", 512], "payload.steps[1].args[1]: workspace offset 512"),
    (CPU, ("steps", 1, "args", 2), ["immediate", 1], "payload.steps[1].args[2]: an immediate is [dtype, number]"),
    (
        CPU,
        ("steps", 1, "args", 2, 1),
        ["int8", 1],
        "payload.steps[1].args[2]: an immediate is [dtype, number] of one of int32, int64, float32, float64",
    ),
    (CPU, ("steps", 1, "args", 2, 1), ["int32"], "payload.steps[1].args[2]: an immediate is [dtype, number]"),
    (CPU, ("steps", 1, "args", 2, 1), ["int32", "1"], 'payload.steps[1].args[2]: expected an integer, got "1"'),
    (CPU, ("steps", 1, "args", 2, 1), ["int32", 1.0], "payload.steps[1].args[2]: expected an integer, got 1.0"),
    (CPU, ("steps", 1, "args", 2, 1), ["int32", 2**31], "payload.steps[1].args[2]: got 2147483648, the rule is"),
    (CPU, ("steps", 1, "args", 2, 1), ["int32", -(2**31) - 1], "payload.steps[1].args[2]: got -2147483649"),
    (CPU, ("steps", 1, "args", 2, 1), ["int64", 2**63], "payload.steps[1].args[2]: got 9223372036854775808"),
    (CPU, ("steps", 1, "args", 2, 1), ["float32", "1"], 'payload.steps[1].args[2]: expected a number, got "1"'),
    (CPU, ("steps", 1, "args", 2, 1), ["float32", 3.5e38], "payload.steps[1].args[2]: got 35000000000000000"),
    (CPU, ("steps", 1, "args", 2, 1), ["float32", math.nan], "payload.steps[1].args[2]: got nan, the rule is a finite"),
    (CPU, ("steps", 1, "args", 2, 1), ["float64", -math.inf], "payload.steps[1].args[2]: got -inf, the rule is a"),
    (CPU, ("steps", 0, "bytes"), 17, "payload.steps[0].dest: bytes is 17, the buffer has 16"),
    (CPU, ("steps", 0, "dest"), ["operand", 0], "payload.steps[0].dest: operand 0 is an input and"),
    (CPU, ("steps", 0, "dest"), ["immediate", 0], 'payload.steps[0].dest: got "immediate"'),
    (CPU, ("steps", 2, "bytes"), 257, "payload.steps[2].dest: bytes is 257, the buffer has 256"),
    (CPU, ("requires", "platform"), "cuda", 'payload.steps[1].kind: "host" steps run on cpu'),
    (CUDA, ("requires", "platform"), "cpu", 'payload.steps[0].kind: "cudnn" steps run on cuda'),
    (CUDA, ("steps", 0, "graph"), "", "payload.steps[0].graph: text of 0 bytes"),
    (CUDA, ("steps", 0, "plan"), "text", "payload.steps[0].plan: expected binary"),
    (CUDA, ("steps", 0, "knobs"), {"a": -1}, 'payload.steps[0].knobs["a"]: got -1'),
    (CUDA, ("steps", 0, "knobs"), {"k" * 257: 1}, "payload.steps[0].knobs: a key of 257 bytes"),
    (CUDA, ("steps", 0, "knobs"), {str(i): 1 for i in range(65)}, "payload.steps[0].knobs: has 65 entries"),
    (CUDA, ("steps", 0, "uids"), [1], "payload.steps[0].args: has 2 entries, uids has 1"),
    (CUDA, ("steps", 0, "workspace"), [0, 513], "payload.steps[0].workspace: slice [0,513]"),
    (CUDA, ("steps", 0, "workspace"), [8, 8], "payload.steps[0].workspace: slice [8,8]"),
    (CUDA, ("steps", 0, "workspace"), [256, 2**63 - 1], "payload.steps[0].workspace: slice ["),
    (CUDA, ("requires", "cudnn"), None, 'payload.requires.cudnn: got null, the "cudnn" step at payload.steps[0]'),
    (KERNELS, ("requires", "arch"), None, 'payload.requires.arch: got null, the "cubin" step at payload.steps[0]'),
    (KERNELS, ("requires", "cutedsl"), None, 'payload.requires.cutedsl: got null, the "cute" step at payload.steps[1]'),
    (CUDA, ("requires", "cutedsl"), 4.8, "payload.requires.cutedsl: expected text, got 4.8"),
    (KERNELS, ("steps", 0, "kernel"), "", "payload.steps[0].kernel: text of 0 bytes"),
    (KERNELS, ("steps", 0, "kernel"), "k" * 1025, "payload.steps[0].kernel: text of 1025 bytes"),
    (KERNELS, ("steps", 0, "kernel"), "k\n", 'payload.steps[0].kernel: got "k\\n", the rule is printable ASCII'),
    (KERNELS, ("steps", 0, "image"), b"", "payload.steps[0].image: binary of 0 bytes"),
    (KERNELS, ("steps", 0, "grid"), [1, 1], "payload.steps[0].grid: has 2 entries, the rule is 3"),
    (KERNELS, ("steps", 0, "grid"), [1, 0, 1], "payload.steps[0].grid[1]: got 0"),
    (KERNELS, ("steps", 0, "grid"), [2**31, 1, 1], "payload.steps[0].grid[0]: got 2147483648"),
    (KERNELS, ("steps", 0, "grid"), [1, 65536, 1], "payload.steps[0].grid[1]: got 65536, the rule is at most 65535"),
    (KERNELS, ("steps", 0, "args"), [["operand", 0]] * 193, "payload.steps[0].args: has 193 entries"),
    (KERNELS, ("steps", 1, "function"), 1, "payload.steps[1].function: expected text, got 1"),
    (KERNELS, ("steps", 1, "object"), "text", "payload.steps[1].object: expected binary"),
    (KERNELS, ("steps", 0, "image"), msgpack.ExtType(1, b"image"), f"payload: {EXTENSION}"),
    (CUDA, ("steps", 0, "plan"), msgpack.ExtType(5, b"plan"), f"payload: {EXTENSION}"),
    (CUDA, ("steps", 0, "knobs"), {"a": msgpack.Timestamp(0)}, f"payload: {EXTENSION}"),
    (CUDA, ("steps", 0, "device"), 1, "payload.steps[0].device: expected text, got 1"),
]


@pytest.mark.parametrize(("base", "path", "value", "message"), BAD_FIELDS)
def test_a_bad_field_is_named(base: Payload, path: tuple[Any, ...], value: Any, message: str) -> None:
    assert problem(seal(changed(base, path, value))).startswith(message)


@pytest.mark.parametrize(
    ("artifact", "message"),
    [
        (b"", "artifact: not valid MessagePack"),
        (b"\xc1", "artifact: not valid MessagePack"),
        (msgpack.packb([1, 2]), "artifact.magic: not a cudnn_jax program"),
        (msgpack.packb(None), "artifact.magic: not a cudnn_jax program"),
        (seal(CPU, magic="other"), "artifact.magic: not a cudnn_jax program"),
        (seal(CPU, version=2), "artifact.version: 2, this build reads version 1"),
        (seal(CPU, version=2**64 - 1, more=1), "artifact.version: 18446744073709551615, this build reads"),
        (seal(CPU, version=0), "artifact.version: got 0"),
        (seal(CPU, version="1"), "artifact.version: expected an integer"),
        (seal(CPU, more=1), 'artifact: unknown field "more"'),
        (seal(CPU, sha256=b"0" * 32), "artifact.sha256: does not match the payload"),
        (seal(CPU, sha256=b"0" * 31), "artifact.sha256: binary of 31 bytes"),
        (seal(CPU, payload="text"), "artifact.payload: expected binary"),
        (seal(CPU, sha256=msgpack.ExtType(0, b"0" * 32)), f"artifact: {EXTENSION}"),
        (seal([1]), "payload: expected a map, got [1]"),  # type: ignore[arg-type]
        (seal(CPU) + b"\0", "artifact: not valid MessagePack"),
        (b"\x82\xa1a\x01\xa1a\x02", "artifact: not valid MessagePack, the key"),
        (b"\x91" * 1_000_000, "artifact: not valid MessagePack, nested deeper than 8 levels"),
        (b"\xdd\xff\xff\xff\xff", "artifact: not valid MessagePack"),
        (b"\xc6\xff\xff\xff\xff", "artifact: not valid MessagePack"),
        (b"\x81\xa1\xff\x01", "artifact.magic: not a cudnn_jax program"),
    ],
)
def test_a_foreign_artifact_is_refused(artifact: bytes, message: str) -> None:
    assert problem(artifact).startswith(message)


def test_an_extension_type_is_one_line_when_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "program"
    file.write_bytes(seal(changed(KERNELS, ("steps", 0, "image"), msgpack.ExtType(1, b"image"))))
    assert _program.main(file=str(file)) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err == f"{file}: payload: {EXTENSION}\n"


def test_text_that_is_not_utf8_is_printable_in_the_message() -> None:
    packed = msgpack.packb(CPU).replace(b"fill", b"f\xff\nl")
    assert problem(seal({}, payload=packed, sha256=hashlib.sha256(packed).digest())).startswith("payload.steps[0].kind")


def test_a_deep_payload_is_refused() -> None:
    packed = b"\x91" * 100_000
    text = problem(seal({}, payload=packed, sha256=hashlib.sha256(packed).digest()))
    assert text.startswith("payload: not valid MessagePack, nested deeper than 8 levels")


BASES = [CPU, CUDA, KERNELS]
SEALED = [seal(base) for base in BASES]


@given(st.sampled_from(SEALED), st.integers(0, 10**6))
def test_every_truncation_is_refused(artifact: bytes, length: int) -> None:
    problem(artifact[: length % len(artifact)])


@given(st.sampled_from(SEALED), st.integers(0, 10**6))
def test_every_flipped_bit_is_refused(artifact: bytes, bit: int) -> None:
    damaged = bytearray(artifact)
    damaged[bit // 8 % len(damaged)] ^= 1 << bit % 8
    problem(bytes(damaged))


@given(st.binary(max_size=300))
def test_noise_is_refused(noise: bytes) -> None:
    problem(noise)


@settings(max_examples=1000)
@given(st.sampled_from(BASES), st.integers(0, 10**6))
def test_a_resealed_payload_with_a_flipped_bit_passes_or_names_its_field(base: Payload, bit: int) -> None:
    packed = bytearray(msgpack.packb(base))
    packed[bit // 8 % len(packed)] ^= 1 << bit % 8
    content = bytes(packed)
    try:
        _ffi.program_check(seal({}, payload=content, sha256=hashlib.sha256(content).digest()))
    except (ValueError, NotImplementedError) as error:
        assert str(error).startswith("payload") and "\n" not in str(error)
