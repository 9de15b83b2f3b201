"""`python -m gpu.gdn_once`: the smallest drawn case of each engine of Gated DeltaNet, once, for a sanitizer."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from gpu import gdn_backward_programs, gdn_programs, gdn_recurrent_programs
from gpu.running import run


def smallest(programs: Any) -> tuple[Any, str]:
    """A case of several sequences, and the plan that its program was built for."""
    cases = [(case, number) for number, case in enumerate(programs.cases()) if len(case.sizes.lengths) > 1]
    case, number = min(cases, key=lambda each: each[0].sizes.total * each[0].sizes.gates)
    names = programs.implementations(case.graph(case.draw(np.random.default_rng(0))))
    return case, names[number % len(names)]


def main() -> int:
    for programs in (gdn_programs, gdn_recurrent_programs, gdn_backward_programs):
        case, name = smallest(programs)
        given = case.draw(np.random.default_rng(0))
        graph = case.graph(given)
        made = run(graph, [given[tensor.name] for tensor in graph.inputs], name)
        case.check(graph, [np.asarray(array) for array in made], case.expected(given))
        print(f"{name}: {case}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
