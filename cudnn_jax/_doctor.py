"""`python -m cudnn_jax doctor`: what this machine has, and what each missing thing would bring."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Finding:
    """One line of the report. `status` is "ok", "missing" (optional) or "broken"."""

    item: str
    status: str
    found: str
    meaning: str


def examine() -> list[Finding]:
    """Looks at everything; never raises, and opens no DSL."""
    return [check() for check in _CHECKS]


def main(*, as_json: bool = False) -> int:
    """Prints the report; 1 if something is broken, 0 if at most optional things are missing."""
    findings = examine()
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        _print(findings)
    return int(any(finding.status == "broken" for finding in findings))


def _print(findings: list[Finding]) -> None:
    colours = {"ok": "green", "missing": "yellow", "broken": "bold red"}
    table = Table(title="cudnn_jax doctor", title_justify="left")
    for heading in ("item", "status", "found", "what it means"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        colour = colours[finding.status]
        table.add_row(finding.item, f"[{colour}]{finding.status}[/]", finding.found, finding.meaning)
    Console().print(table)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> Finding:
    return Finding("Python", "ok", platform.python_version(), "3.11 or newer is served")


def _package() -> Finding:
    found = _version("cudnn-jax")
    return Finding("cudnn-jax", "ok" if found else "broken", found or "not installed", "this package")


def _jax() -> Finding:
    found = f"jax {_version('jax')}, jaxlib {_version('jaxlib')}"
    return Finding("JAX", "ok", found, "jax 0.10 to 0.12 are served")


def _handlers() -> Finding:
    try:
        from cudnn_jax import _ffi, _runtime

        _runtime.register()
    except Exception as error:
        return Finding("XLA handlers", "broken", _line(error), "programs cannot run; the reference engine still can")
    version = ".".join(map(str, _ffi.XLA_FFI_API_VERSION))
    return Finding("XLA handlers", "ok", f"XLA FFI {version}", "programs run inside compiled functions")


def _devices() -> Finding:
    import jax

    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return Finding("GPU in JAX", "missing", "none", "the reference engine runs everything (extra cuda13)")
    kinds = ", ".join(f"{d.device_kind} (sm_{str(d.compute_capability).replace('.', '')})" for d in devices)
    return Finding("GPU in JAX", "ok", kinds, "operations are planned for these")


def _library(item: str, read: str, meaning: str) -> Callable[[], Finding]:
    def check() -> Finding:
        try:
            from cudnn_jax.engines import versions

            return Finding(item, "ok", _dotted(getattr(versions, read)()), meaning)
        except Exception as error:
            return Finding(item, "missing", _line(error), meaning)

    return check


def _dotted(version: int) -> str:
    """cuDNN counts major * 10000 + minor * 100 + patch, the driver major * 1000 + minor * 10."""
    if version >= 20_000:
        return f"{version // 10_000}.{version // 100 % 100}.{version % 100}"
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


def _optional(item: str, module: str, distribution: str, meaning: str) -> Callable[[], Finding]:
    def check() -> Finding:
        try:
            present = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            present = False
        found = _version(distribution) if present else None
        return Finding(item, "ok" if present else "missing", found or ("present" if present else "none"), meaning)

    return check


def _compiler(item: str, module: str, distribution: str, meaning: str) -> Callable[[], Finding]:
    def check() -> Finding:
        try:
            importlib.import_module(f"cudnn_jax.engines.{module}").available()
        except Exception as error:
            return Finding(item, "missing", _line(error), meaning)
        return Finding(item, "ok", _version(distribution) or "", meaning)

    return check


def _cache() -> Finding:
    meaning = "plans of earlier processes are taken from here (CUDNN_JAX_CACHE_DIR names another folder, or none)"
    try:
        from cudnn_jax.engines import cache, trust

        store = cache.cache_store()
        if store is None:
            return Finding("cache", "missing", "switched off, or no home", meaning)
        problem = trust.reason_against(store.folder) if store.folder.exists() else None
        plans, nbytes, records = store.size()
    except Exception as error:
        return Finding("cache", "broken", _line(error), meaning)
    found = problem or f"{store.folder}: {plans} plans, {nbytes / 2**20:.1f} MiB, {records} autotune records"
    return Finding("cache", "broken" if problem else "ok", found, meaning)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


_CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    _package,
    _jax,
    _handlers,
    _devices,
    _library("CUDA driver", "cuda_driver", "needed to run anything on a GPU"),
    _library("cuDNN", "cudnn", "without it attention on a GPU falls to the reference engine"),
    _compiler("CuTe-DSL", "cutedsl", "nvidia-cutlass-dsl", "builds CuTe-DSL engines (extra cutedsl)"),
    _compiler("cuTile", "cutile", "cuda-tile", "builds cuTile engines (extra cutile)"),
    _cache,
    _optional("Flax", "flax", "flax", "cudnn_jax.flax (extra flax)"),
)
