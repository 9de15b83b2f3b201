"""A planned graph as bytes, and back in another process: the graph, the plan that runs, and the program built of it.

The outer map says what the bytes are and holds their hash; the header in front of the content says whom they are for.
Everything is in MessagePack's plain types: the same graph and plan give the same bytes in every process and on every
Python. A program is code: load only what comes from where you trust.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack

from cudnn_jax import __version__, _ffi
from cudnn_jax.engines import cache, versions
from cudnn_jax.engines.store import Stored, config_of, fields_of
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import GraphNotSupportedError

if TYPE_CHECKING:
    from cudnn_jax.engines.planning import pygraph

Graph = TypeVar("Graph", bound="pygraph")

MAGIC = "cudnn_jax.plan"
VERSION = 1
_RULE = "bytes as pygraph.serialize makes them"
_DEVICE = ("platform", "device_kind", "sm", "sm_count")


def to_bytes(graph: pygraph, target: Target, stored: Stored) -> bytes:
    """The frozen graph and its plan for one target."""
    needs = _needs(stored.program)
    content = _packed(
        {
            "header": {
                "release": stored.release,
                "libraries": {name: needs[name] for name in _LIBRARIES},
                "target": {name: getattr(target, name) for name in _DEVICE},
                # Programs of CuTe-DSL hold code for the host.
                "host": platform.machine(),
                "key": cache.portable_key(graph, target, None),
            },
            "graph": graph.to_json(),
            "plan": fields_of(stored.plan),
            "program": stored.program,
            "derived": stored.derived,
        }
    )
    digest = hashlib.sha256(content).digest()
    return _packed({"magic": MAGIC, "version": VERSION, "sha256": digest, "content": content})


@contextlib.contextmanager
def _well_formed() -> Iterator[None]:
    """A ValueError of one line where a field is missing, or of another type than `to_bytes` writes."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"plan: {said}; the rule: {_RULE}") from None


@_well_formed()
def header(data: bytes) -> dict[str, Any]:
    """Whom the bytes are for: release, libraries, target, host and key. Loads no program.

    Raises:
      ValueError: they are damaged, or of another version, or no plan at all.
    """
    read: dict[str, Any] = _content(data)["header"]
    Target(**read["target"])
    return read


@_well_formed()
def from_bytes(
    kind: type[Graph], data: bytes, target: Target | None, here: Callable[[], Target]
) -> tuple[Graph, Target, Stored]:
    """The frozen graph, of class `kind`, what it was planned for, and its plan.

    Args:
      target: the device that will run it.
      here: what that is if `target` is absent; where it is of another platform, any device of the kind that the bytes
        name will do.

    Raises:
      ValueError: the bytes are damaged, or of another version, or no plan at all.
      GraphNotSupportedError: they are for another release, another library's version, or another device or host.
    """
    content = _content(data)
    said = content["header"]
    if target is None and (local := here()).platform == said["target"]["platform"]:
        target = local
    _check_release(said["release"])
    _check_libraries(said["libraries"])
    target = _checked_target(said, target)
    graph = kind.from_json(content["graph"])
    graph.freeze()
    if cache.portable_key(graph, target, None) != said["key"]:
        raise ValueError(f"plan: its key {said['key'][:16]} is not that of the graph and target beside it; {_RULE}")
    if content["program"] is not None:
        _ffi.program_check(content["program"])
    plan = config_of(content["plan"])
    return graph, target, Stored(plan, (plan,), (), content["program"], content["derived"], said["release"])


def _content(data: bytes) -> dict[str, Any]:
    try:
        outer = msgpack.unpackb(data)
        magic, version = outer["magic"], outer["version"]
    except (TypeError, KeyError, ValueError, msgpack.UnpackException):
        raise ValueError(f"plan: {_described(data)}; the rule: {_RULE}") from None
    if (magic, version) != (MAGIC, VERSION):
        raise ValueError(f"plan: {magic!r} of version {version!r}; the rule: {MAGIC!r} of version {VERSION}")
    if hashlib.sha256(outer["content"]).digest() != outer["sha256"]:
        raise ValueError(f"plan: damaged, its content has another sha256 than it says; the rule: {_RULE}")
    content: dict[str, Any] = msgpack.unpackb(outer["content"])
    return content


def _described(data: Any) -> str:
    return f"{len(data)} bytes that are no plan" if isinstance(data, bytes) else f"got a {type(data).__name__}"


def _needs(program: bytes | None) -> Mapping[str, Any]:
    """What a program asks of the process that runs it; nothing without one."""
    if program is None:
        return dict.fromkeys(_LIBRARIES)
    needs: dict[str, Any] = msgpack.unpackb(msgpack.unpackb(program)["payload"])["requires"]
    return needs


def _check_release(release: str) -> None:
    if release != __version__:
        raise GraphNotSupportedError(f"plan: made by cudnn_jax {release}, here is {__version__}; build it anew")


_LIBRARIES = {"cudnn": versions.cudnn, "cutedsl": versions.cutedsl}
"""What a program may need -> the version that is here."""


def _check_libraries(libraries: Mapping[str, Any]) -> None:
    for name, needed in libraries.items():
        if needed is None:
            continue
        try:
            here: Any = _LIBRARIES[name]()
        except (ImportError, RuntimeError) as error:
            raise GraphNotSupportedError(f"plan: needs {name} {needed}: {' '.join(str(error).split())}") from None
        if here != needed:
            raise GraphNotSupportedError(f"plan: needs {name} {needed}, here is {here}; build it anew")


def _checked_target(said: Mapping[str, Any], target: Target | None) -> Target:
    made_for = Target(**said["target"])
    if made_for.platform == "cuda" and said["host"] != platform.machine():
        raise GraphNotSupportedError(f"plan: made on {said['host']}, here is {platform.machine()}; build it anew")
    if target is None:
        return made_for
    if not same_device(made_for, target):
        raise GraphNotSupportedError(
            f"plan: made for {_device(made_for)}, asked for on {_device(target)}; build it anew"
        )
    return target


def same_device(one: Target, other: Target) -> bool:
    """Whether two targets are of one kind, wherever they are."""
    return all(getattr(one, name) == getattr(other, name) for name in _DEVICE)


def _device(target: Target) -> str:
    return target.describe() if target.platform != "cuda" else f"{target.device_kind} (sm_{target.sm})"


def _packed(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed
