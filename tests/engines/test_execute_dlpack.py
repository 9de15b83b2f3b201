"""DLPack as its header says it, from producers that count: every capsule's deleter is called once, whatever happens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudnn_jax import _ffi
from support.dlpack_producer import CUDA, Source, Unversioned, Versioned, exchange_type

SHAPE = (2, 3)


class Key:
    pass


@pytest.fixture
def tensors() -> list[Key]:
    return [Key(), Key()]


def graph(tensors: list[Key], dtype: str = "float32", dim: tuple[int, ...] = SHAPE) -> _ffi.GraphOperands:
    stride = [int(np.prod(dim[i + 1 :])) for i in range(len(dim))]
    rows = [(tensors[i], f"tensor {'ab'[i]!r}", i + 1, dtype, list(dim), stride, i == 1) for i in range(2)]
    return _ffi.GraphOperands(rows)


def array() -> np.ndarray[Any, Any]:
    memory = np.zeros(64, np.uint8)
    start = -memory.ctypes.data % 16
    return memory[start : start + 24].view(np.float32).reshape(SHAPE)


Lending = exchange_type()
Giving = exchange_type(borrowed=False)
Newer = exchange_type(major=2)
KINDS: list[type[Source]] = [Versioned, Unversioned, Lending, Giving, Newer]


@pytest.mark.parametrize("kind", KINDS, ids=["versioned", "unversioned", "lending", "giving", "newer table"])
def test_a_buffer_is_read_and_let_go_once(tensors: list[Key], kind: type[Source]) -> None:
    sources = [kind(array()), kind(array(), strides=False, offset=16)]
    pack = graph(tensors).pack(dict(zip(tensors, sources, strict=True)))
    assert [operand.pointer for operand in pack.operands] == [source.array.ctypes.data for source in sources]
    assert [source.given for source in sources] == [1, 1]
    if kind is not Lending and kind is not Newer:
        assert [source.deleted for source in sources] == [0, 0]
    del pack
    assert [source.deleted for source in sources] == [1, 1]


def test_what_a_producer_is_asked() -> None:
    keys = [Key(), Key()]
    sources = [Versioned(array()), Unversioned(array())]
    graph(keys).pack(dict(zip(keys, sources, strict=True)))
    assert sources[0].keywords["max_version"] >= (1, 1) and set(sources[0].keywords) == {"max_version"}
    assert sources[1].keywords == {"stream": None}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another major version": ({"version": (2, 0)}, "the buffer comes by DLPack 2.0, the rule is version 1"),
    "dtype": ({"dtype": (2, 16, 1)}, "the graph has float32, the buffer is float16"),
    "lanes": ({"dtype": (2, 32, 4)}, "element type is DLPack's (code 2, bits 32, lanes 4), which no program has"),
    "complex": ({"dtype": (5, 64, 1)}, "code 5, bits 64, lanes 1"),
    "device": ({"device": (CUDA, 3)}, "the graph runs on cpu, the buffer is on cuda:3"),
    "other device": ({"device": (10, 0)}, "the graph runs on cpu, the buffer is on DLPack device (10, 0)"),
    "dim": ({"shape": (2,)}, "the graph has dim (2, 3), the buffer has (2,)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_refused_buffer_is_let_go_once(tensors: list[Key], name: str) -> None:
    options, message = WRONG[name]
    good, bad = Versioned(array()), Versioned(array(), **options)
    with pytest.raises(ValueError) as raised:
        graph(tensors).pack({tensors[0]: good, tensors[1]: bad})
    assert str(raised.value).startswith("tensor 'b': ") and message in str(raised.value)
    assert (good.given, good.deleted, bad.given, bad.deleted) == (1, 1, 1, 1)


def test_a_read_only_output_is_let_go_once(tensors: list[Key]) -> None:
    good, bad = Versioned(array(), flags=1), Versioned(array(), flags=1)
    with pytest.raises(ValueError, match="tensor 'b': an output, and the buffer is read-only"):
        graph(tensors).pack({tensors[0]: good, tensors[1]: bad})
    assert (good.deleted, bad.deleted) == (1, 1)


def test_a_capsule_of_another_name_is_refused(tensors: list[Key]) -> None:
    class Misnamed(Versioned):
        def __dlpack__(self, **_: Any) -> Any:
            return self.capsule(versioned=True, name=b"used_dltensor")

    class NoCapsule(Versioned):
        def __dlpack__(self, **_: Any) -> Any:
            return 5

    for kind in (Misnamed, NoCapsule):
        good, bad = Versioned(array()), kind(array())
        with pytest.raises(ValueError, match="tensor 'b': __dlpack__ gave no capsule named"):
            graph(tensors).pack({tensors[0]: good, tensors[1]: bad})
        assert (good.deleted, bad.deleted) == (1, 0)


def test_a_table_that_fails_is_told(tensors: list[Key]) -> None:
    for borrowed in (True, False):
        bad = exchange_type(borrowed=borrowed, failing=True)(array())
        with pytest.raises(ValueError, match="tensor 'a': no reason given"):
            graph(tensors).pack({tensors[0]: bad, tensors[1]: Versioned(array())})


def test_the_table_serves_the_cpu_without_a_stream(tensors: list[Key]) -> None:
    kind = exchange_type()
    graph(tensors).pack({tensors[0]: kind(array()), tensors[1]: kind(array())})
    assert kind.asked == []  # type: ignore[attr-defined]


DTYPES = {
    "bool": (6, 8),
    "int8": (0, 8),
    "uint8": (1, 8),
    "int32": (0, 32),
    "int64": (0, 64),
    "float16": (2, 16),
    "float32": (2, 32),
    "float64": (2, 64),
    "bfloat16": (4, 16),
    "float8_e4m3fn": (10, 8),
    "float8_e5m2": (12, 8),
    "float8_e8m0fnu": (14, 8),
    "float4_e2m1fn": (17, 4),
}


@pytest.mark.parametrize("name", DTYPES)
def test_element_types(name: str) -> None:
    """Each is taken as itself, and no other is."""
    keys = [Key(), Key()]
    for other, (code, bits) in DTYPES.items():
        sources = [Versioned(array(), dtype=(code, bits, 1)) for _ in range(2)]
        call = {keys[0]: sources[0], keys[1]: sources[1]}
        if other == name:
            assert graph(keys, name).pack(call).operands[0].dtype == name
        else:
            with pytest.raises(ValueError, match=f"the graph has {name}, the buffer is {other}"):
                graph(keys, name).pack(call)


def test_four_bit_types_come_in_pairs_or_one_by_one_but_not_padded() -> None:
    keys = [Key(), Key()]
    operands = graph(keys, "float4_e2m1fn", (2, 6))
    in_pairs = [Versioned(array(), dtype=(17, 4, 2)) for _ in range(2)]
    pack = operands.pack(dict(zip(keys, in_pairs, strict=True)))
    assert pack.operands[0].shape == (2, 6)
    padded = [Versioned(array(), dtype=(17, 4, 1), flags=4) for _ in range(2)]
    with pytest.raises(ValueError, match="keeps one float4_e2m1fn in a byte, the rule is two"):
        operands.pack(dict(zip(keys, padded, strict=True)))


def test_torch_tensors() -> None:
    """A library with a table of its own, where it is installed."""
    torch = pytest.importorskip("torch")
    keys = [Key(), Key()]
    given = [torch.zeros(SHAPE), torch.zeros(SHAPE)]
    pack = graph(keys).pack(dict(zip(keys, given, strict=True)))
    assert [operand.pointer for operand in pack.operands] == [tensor.data_ptr() for tensor in given]
