"""`python -m benchmarks picture RESULT.json PICTURE`: the chosen plans of one result beside the peers, as bars."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

BASE = "jax.nn cudnn"
OURS = "cudnn_jax"
COLOURS = {OURS: "tab:green", BASE: "tab:gray", "flash-attn3-jax": "tab:blue"}


def speeds(result: dict[str, Any], direction: str) -> dict[str, dict[str, float]]:
    """case -> {name: speed as a multiple of jax.nn's "cudnn"}, from the wall clock of the chosen plan's rows."""
    found: dict[str, dict[str, float]] = {}
    for row in result["rows"]:
        if row["direction"] != direction or row["clock"] != "wall" or not row["chosen"]:
            continue
        case = found.setdefault(row["case"], {})
        if row["peer"] == BASE:
            case |= {OURS: row["ratio"], BASE: 1.0}
        elif row["peer"] in COLOURS:
            case[row["peer"]] = row["ms"] / row["peer_ms"]
    for case in found.values():
        # A peer's ratio is to our plan; ours is to the base.
        case |= {name: value * case[OURS] for name, value in case.items() if name not in (OURS, BASE)}
    return found


def draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 5.5), dpi=110, sharey=True, layout="constrained")
    for axes, direction in zip(panels, ("forward", "forward+backward"), strict=True):
        cases = speeds(result, direction)
        for at, name in enumerate(COLOURS):
            rows = [(i + 0.27 * (at - 1), case[name]) for i, case in enumerate(cases.values()) if name in case]
            bars = axes.barh([y for y, _ in rows], [x for _, x in rows], 0.25, color=COLOURS[name], label=name)
            axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=7)
        axes.set_yticks(range(len(cases)), list(cases))
        axes.axvline(1.0, color="black", lw=0.8)
        axes.set(title=direction, xlabel=f"speed, {BASE} = 1", xlim=(0, 1.6))
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(COLOURS), fontsize=8)
    jax_version, cudnn = (result["versions"][name] for name in ("jax", "nvidia-cudnn-cu13"))
    figure.suptitle(f"Attention, bfloat16, {result['device']}: jax {jax_version}, cuDNN {cudnn}, {result['date']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks picture", description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args(argv)
    draw(json.loads(args.result.read_text()), args.picture)
    return 0
