"""Gates without channels: what makes GDN of KDA, and KDA of GDN-2."""

from __future__ import annotations

import numpy as np

from support.linear_attention import Array, Arrays


def collapsed(given: Arrays) -> dict[str, Arrays]:
    """Operands of each operation that mean what those of a gdn do."""
    wide = {"g": np.repeat(given["g"][..., None], given["q"].shape[2], axis=2)}
    erased = np.repeat(given["beta"][..., None], given["q"].shape[2], axis=2)
    written = np.repeat(given["beta"][..., None], given["v"].shape[2], axis=2)
    return {"gdn": given, "kda": given | wide, "gdn2": given | wide | {"beta": erased, "w": written}}


def of_gates(gradients: Arrays, shape: tuple[int, ...]) -> Arrays:
    """dG and dBeta of gates (T, HO), by the gradients of any operation's."""

    def summed(name: str) -> Array:
        return gradients[name].astype(np.float64).reshape(*shape, -1).sum(-1)

    d_beta = sum(summed(name) for name in ("dBeta", "dW") if name in gradients)
    return {"dG": summed("dG"), "dBeta": np.asarray(d_beta)}
