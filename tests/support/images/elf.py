"""Reads from a CUDA image, an ELF file, what each kernel in it takes: no tool of the CUDA toolkit is needed."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAGIC = b"\x7fELF\x02\x01"
CUDA_MACHINE = 190
_NOBITS = 8
_WITH_BYTES = 4
_REQUIRED_THREADS, _FRAME_SIZE, _REGISTERS = 0x10, 0x11, 0x2F
"""Attributes of .nv.info sections: (symbol, number), or three sizes of a block."""


@dataclass(frozen=True)
class Resources:
    """One kernel.

    Attributes:
      registers: of each thread.
      local: bytes of local memory that each thread needs, which is where registers are spilled.
      shared: bytes of shared memory that a block always takes.
      threads: of a block; 0 if the image does not fix them.
    """

    registers: int
    local: int
    shared: int
    threads: int


def images_in(data: bytes) -> list[bytes]:
    """The CUDA images inside other bytes, such as a host object, each with what follows it."""
    starts = [found.start() for found in re.finditer(re.escape(MAGIC), data)]
    return [data[start:] for start in starts if _machine(data, start) == CUDA_MACHINE]


@dataclass(frozen=True)
class _Section:
    name: str
    type: int
    size: int
    data: bytes


def kernels(image: bytes) -> dict[str, Resources]:
    """What each kernel of an image takes, by its symbol.

    Raises:
      ValueError: the bytes are no CUDA image.
    """
    if not image.startswith(MAGIC) or _machine(image) != CUDA_MACHINE:
        raise ValueError("not a CUDA image: the rule is a 64-bit ELF file for the CUDA machine")
    sections = {section.name: section for section in _sections(image)}
    symbols = _symbols(sections)
    by_symbol: dict[tuple[int, str], int] = {}
    for attribute, value in _attributes(sections[".nv.info"].data):
        if attribute in (_FRAME_SIZE, _REGISTERS):
            at, number = struct.unpack("<II", value)
            by_symbol[attribute, symbols[at]] = number
    found = {}
    for name in [name.removeprefix(".text.") for name in sections if name.startswith(".text.")]:
        own = dict(_attributes(sections[f".nv.info.{name}"].data))
        shared = sections.get(f".nv.shared.{name}")
        x, y, z = struct.unpack("<III", own[_REQUIRED_THREADS]) if _REQUIRED_THREADS in own else (0, 0, 0)
        found[name] = Resources(
            registers=by_symbol[_REGISTERS, name],
            local=by_symbol[_FRAME_SIZE, name],
            shared=shared.size if shared else 0,
            threads=x * y * z,
        )
    return found


def _machine(image: bytes, start: int = 0) -> int:
    return int.from_bytes(image[start + 18 : start + 20], "little")


def _sections(image: bytes) -> Iterator[_Section]:
    (table,) = struct.unpack_from("<Q", image, 0x28)
    count, names_at = struct.unpack_from("<HH", image, 0x3C)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, table + 64 * at) for at in range(count)]
    names = headers[names_at][4]
    for name, kind, _, _, offset, size, *_ in headers:
        end = image.index(b"\0", names + name)
        data = b"" if kind == _NOBITS else image[offset : offset + size]
        yield _Section(image[names + name : end].decode(), kind, size, data)


def _symbols(sections: dict[str, _Section]) -> list[str]:
    table, text = sections[".symtab"].data, sections[".strtab"].data
    starts = [struct.unpack_from("<I", table, at)[0] for at in range(0, len(table), 24)]
    return [text[start : text.index(b"\0", start)].decode() for start in starts]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, value) of an .nv.info section: four bytes, of which the last two are the value or its size."""
    at = 0
    while at < len(data):
        form, attribute, number = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _WITH_BYTES:
            yield attribute, data[at : at + number]
            at += number
        else:
            yield attribute, struct.pack("<H", number)
