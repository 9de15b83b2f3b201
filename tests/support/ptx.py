"""Runs the PTX of a small kernel on arrays, thread by thread: numerics, bounds and alignment without a GPU.

Serves what straight-line and branching elementwise kernels use; an instruction that it does not know is a KeyError.
Floating results are computed in float64 and rounded, approximate instructions included.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

_FLOATS = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32}
_WORDS = {2: np.uint16, 4: np.uint32}


class Instruction(NamedTuple):
    predicate: str
    negated: bool
    name: list[str]
    operands: list[str]


class Memory:
    """Buffers in one address space, with gaps in which nothing lies."""

    def __init__(self) -> None:
        self._buffers: list[tuple[int, np.ndarray]] = []

    def place(self, array: np.ndarray) -> int:
        """The address that an array gets."""
        address = (len(self._buffers) + 1) << 40
        self._buffers.append((address, array.view(np.uint8).reshape(-1)))
        return address

    def at(self, address: int, size: int) -> np.ndarray:
        """The `size` bytes at an address, which is a multiple of it."""
        assert address % size == 0, f"address {address:#x} of {size} bytes is not aligned"
        for start, data in self._buffers:
            if start <= address and address + size <= start + len(data):
                return data[address - start : address - start + size]
        raise IndexError(f"{size} bytes at {address:#x} are in no buffer")


def compiled(fn: Any, pointers: list[Any], chip: str, folder: Path) -> str:
    """The PTX of the one kernel of a CuTe-DSL function."""
    import cuda.bindings.driver as driver
    from cutlass import cute

    folder.mkdir()
    cute.compile(fn, *pointers, driver.CUstream(0), options=f"--gpu-arch {chip} --keep-ptx --dump-dir {folder}")
    (file,) = folder.glob("*.ptx")
    return file.read_text()


def run(text: str, addresses: list[int], blocks: range, threads: int, memory: Memory) -> None:
    """Runs every thread of some blocks, in order; the kernel takes addresses alone."""
    program, labels = _parse(text)
    with np.errstate(all="ignore"):
        for block in blocks:
            for thread in range(threads):
                _Thread(addresses, {"%tid.x": thread, "%ctaid.x": block}, memory).run(program, labels)


def _parse(text: str) -> tuple[list[Instruction], dict[str, int]]:
    program: list[Instruction] = []
    labels: dict[str, int] = {}
    for raw in text[text.index("{", text.index(".reqntid")) :].split("\n")[1:]:
        line = raw.split("//")[0].strip().rstrip(";")
        if line == "}":
            break
        if line.endswith(":"):
            labels[line[:-1]] = len(program)
        elif line and not line.startswith("."):
            guard, line = line.split(None, 1) if line.startswith("@") else ("", line)
            name, *rest = line.split(None, 1)
            operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", rest[0] if rest else "")
            program.append(Instruction(guard.strip("@!"), "!" in guard, name.split("."), operands))
    return program, labels


def _float(bits: int, kind: str) -> Any:
    dtype = np.dtype(_FLOATS[kind])
    mask = (1 << 8 * dtype.itemsize) - 1
    return np.float64(np.array(bits & mask, _WORDS[dtype.itemsize]).view(dtype))


def _bits(value: Any, kind: str) -> int:
    made = np.array(value, np.float64).astype(np.float32).astype(_FLOATS[kind])
    return int(made.view(_WORDS[made.dtype.itemsize]))


def _integer(bits: int, kind: str) -> int:
    width = int(kind[1:])
    bits &= (1 << width) - 1
    return bits - (1 << width) if kind[0] == "s" and bits >> (width - 1) else bits


def _read(bits: int, kind: str) -> Any:
    return _float(bits, kind) if kind in _FLOATS else _integer(bits, kind)


def _parts(braced: str) -> list[str]:
    return [each.strip() for each in braced.strip("{}").split(",")]


_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "ltu": lambda a, b: not a >= b,
    "gtu": lambda a, b: not a <= b,
}
_FLOAT_OPS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
    "neg": lambda a: -a,
    "abs": abs,
    "ex2": np.exp2,
    "rcp": lambda a: 1 / a,
    "copysign": lambda a, b: np.copysign(b, a),
}
_INTEGER_OPS: dict[str, Callable[..., int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "min": min,
    "max": max,
    "or": lambda a, b: a | b,
    "and": lambda a, b: a & b,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "rem": lambda a, b: int(math.fmod(a, b)),
}


class _Thread:
    def __init__(self, addresses: list[int], special: dict[str, int], memory: Memory) -> None:
        self.addresses = addresses
        self.registers = special
        self.memory = memory

    def run(self, program: list[Instruction], labels: dict[str, int]) -> None:
        at = 0
        while at < len(program):
            step = program[at]
            at += 1
            if step.predicate and bool(self.registers[step.predicate]) == step.negated:
                continue
            if step.name[0] == "ret":
                return
            if step.name[0] == "bra":
                at = labels[step.operands[0]]
            else:
                getattr(self, f"_{step.name[0]}", self._arithmetic)(step.name, *step.operands)

    def _value(self, operand: str) -> int:
        if operand.startswith("%"):
            return self.registers[operand]
        return int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0)

    def _set(self, register: str, value: int, width: int) -> None:
        self.registers[register] = value & ((1 << width) - 1)

    def _place(self, operand: str, kind: str, registers: str) -> tuple[list[str], np.ndarray]:
        base, offset = re.fullmatch(r"\[(%\w+)(?:\+(-?\d+))?\]", operand).groups()  # type: ignore[union-attr]
        names = _parts(registers)
        size = int(kind[1:]) // 8 * len(names)
        return names, self.memory.at(self.registers[base] + int(offset or 0), size)

    def _ld(self, name: list[str], target: str, source: str) -> None:
        if name[1] == "param":
            self.registers[target] = self.addresses[int(source.rpartition("_param_")[2].strip("]"))]
            return
        names, data = self._place(source, name[-1], target)
        for register, word in zip(names, data.reshape(len(names), -1), strict=True):
            self.registers[register] = int.from_bytes(word.tobytes(), "little")

    def _st(self, name: list[str], target: str, source: str) -> None:
        names, data = self._place(target, name[-1], source)
        for register, word in zip(names, data.reshape(len(names), -1), strict=True):
            value = self._value(register) & ((1 << 8 * len(word)) - 1)
            word[:] = np.frombuffer(value.to_bytes(len(word), "little"), np.uint8)

    def _mov(self, name: list[str], target: str, source: str) -> None:
        width = int(name[-1][1:])
        if target.startswith("{"):
            names = _parts(target)
            for position, register in enumerate(names):
                part = width // len(names)
                self._set(register, self._value(source) >> part * position, part)
        elif source.startswith("{"):
            part = width // len(_parts(source))
            words = [(self._value(each) & ((1 << part) - 1)) << part * at for at, each in enumerate(_parts(source))]
            self._set(target, sum(words), width)
        else:
            self._set(target, self._value(source), width)

    def _cvt(self, name: list[str], target: str, *sources: str) -> None:
        to, of = name[-2:]
        if to.endswith("x2"):
            high, low = (_bits(_float(self._value(source), of), to[:-2]) for source in sources)
            self._set(target, high << 16 | low, 32)
        elif to in _FLOATS:
            self.registers[target] = _bits(_read(self._value(sources[0]), of), to)
        else:
            self._set(target, int(_read(self._value(sources[0]), of)), int(to[1:]))

    def _setp(self, name: list[str], target: str, *sources: str) -> None:
        self.registers[target] = _COMPARE[name[1]](*(_read(self._value(source), name[-1]) for source in sources))

    def _selp(self, name: list[str], target: str, yes: str, no: str, chosen: str) -> None:
        self.registers[target] = self._value(yes if self.registers[chosen] else no)

    def _arithmetic(self, name: list[str], target: str, *sources: str) -> None:
        kind = name[-1]
        values = [self._value(source) for source in sources]
        if kind.endswith("x2"):
            half = kind[:-2]
            low, high = (
                _bits(_FLOAT_OPS[name[0]](*(_float(v >> shift, half) for v in values)), half) for shift in (0, 16)
            )
            self._set(target, high << 16 | low, 32)
        elif kind in _FLOATS:
            self.registers[target] = _bits(_FLOAT_OPS[name[0]](*(_float(v, kind) for v in values)), kind)
        elif name[0] in ("mul", "mad"):
            width = int(kind[1:])
            product = _integer(values[0], kind) * _integer(values[1], kind)
            product = product >> width if name[1] == "hi" else product
            added = values[2] if name[0] == "mad" else 0
            self._set(target, product + added, width * (2 if name[1] == "wide" else 1))
        else:
            numbers = [_integer(v, kind) for v in values]
            self._set(target, _INTEGER_OPS[name[0]](*numbers), int(kind[1:]))
