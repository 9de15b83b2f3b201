"""What the DSLs' compilers hand to a program: all that the builder knows of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CubinImage:
    """A cuTile kernel for one architecture.

    Attributes:
      data: the image, an ELF file.
      kernel: the symbol of the kernel in it.
    """

    data: bytes
    kernel: str


@dataclass(frozen=True)
class CuteObject:
    """A CuTe-DSL function, compiled for one architecture.

    Attributes:
      data: the object file.
      function: the prefix that the function was exported with.
      version: of the DSL that made it, whose runtime the object needs, such as "4.8.1".
    """

    data: bytes
    function: str
    version: str
