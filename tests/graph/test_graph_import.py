"""What importing the graph costs, in fresh interpreters."""

from __future__ import annotations

import os
import subprocess
import sys

MILLISECONDS = """
import cudnn_jax, sys, time
before = set(sys.modules)
start = time.process_time()
import cudnn_jax.graph
print(1e3 * (time.process_time() - start))
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
"""


def test_the_import_is_quick_and_stays_in_the_standard_library(tmp_path) -> None:
    environment = os.environ | {"PYTHONPYCACHEPREFIX": str(tmp_path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    taken = []
    for _ in range(6):
        command = [sys.executable, "-c", MILLISECONDS]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        spent, loaded = done.stdout.splitlines()
        taken.append(float(spent))
        assert set(loaded.split()) <= {"cudnn_jax", *sys.stdlib_module_names}
    assert min(taken[1:]) < 30, taken
