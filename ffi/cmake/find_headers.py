"""Prints the folder that holds a header of an installed distribution: find_headers.py HEADER DISTRIBUTION...

The distributions are tried in order. Works wherever the interpreter finds its packages, so in an isolated
build as in a build without isolation.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path, PurePosixPath


def folder_of(header: str, distribution: str) -> Path | None:
    wanted = PurePosixPath(header).parts
    try:
        listed = files(distribution) or []
    except PackageNotFoundError:
        return None
    for entry in listed:
        if entry.parts[-len(wanted) :] == wanted:
            found = Path(str(entry.locate())).resolve()
            if found.is_file():
                return found.parents[len(wanted) - 1]
    return None


def main(header: str, *distributions: str) -> int:
    for distribution in distributions:
        folder = folder_of(header, distribution)
        if folder is not None:
            print(folder)
            return 0
    print(f"{header}: not in any of {', '.join(distributions)} as this Python sees them", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
