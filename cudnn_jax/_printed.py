"""Results that print themselves as tables."""

from __future__ import annotations

from rich.console import Console


class Printed:
    """What rich can print, as text too."""

    def __str__(self) -> str:
        console = Console(width=160, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return capture.get()
