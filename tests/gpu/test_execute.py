"""`graph.execute` on a GPU: torch, jax, views and addresses; streams, devices and contexts."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cudnn_jax
from cudnn_jax import _ffi, data_type
from cudnn_jax.engines import planning

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)

BATCH, HEADS, LENGTH, DIM = 2, 4, 256, 64
SHAPE = (BATCH, HEADS, LENGTH, DIM)


class Attention:
    """A causal attention graph in bfloat16, its program, and tensors of torch on one device."""

    def __init__(self, device: int = 0, seed: int | None = None) -> None:
        self.graph: planning.pygraph = cudnn_jax.pygraph(io_data_type=data_type.BFLOAT16)
        self.q, self.k, self.v = (self.graph.tensor(dim=SHAPE, name=name) for name in "qkv")
        self.o, _ = self.graph.sdpa(
            self.q, self.k, self.v, generate_stats=False, use_causal_mask=True, attn_scale=DIM**-0.5
        )
        self.o.set_output(True).set_name("o").set_dim(SHAPE).set_stride([HEADS * LENGTH * DIM, LENGTH * DIM, DIM, 1])
        self.device = f"cuda:{device}"
        rng = np.random.default_rng(seed)
        self.arrays = [torch.tensor(rng.standard_normal(SHAPE, np.float32)).bfloat16().to(self.device) for _ in "qkv"]
        self.out = torch.full(SHAPE, float("nan"), dtype=torch.bfloat16, device=self.device)

    def workspace(self) -> Any:
        size = self.graph.get_workspace_size()
        return torch.empty(size, dtype=torch.uint8, device=self.device) if size else None

    def buffers(self, *given: Any) -> dict[Any, Any]:
        return dict(zip((self.q, self.k, self.v, self.o), given or (*self.arrays, self.out), strict=True))

    def check(self, out: Any = None) -> None:
        torch.cuda.synchronize(self.device)
        want = torch.nn.functional.scaled_dot_product_attention(*(x.float() for x in self.arrays), is_causal=True)
        got = (self.out if out is None else out).float()
        error = (got - want).norm() / want.norm()
        assert error < 1e-2, f"relative error {error}"


@pytest.fixture
def handle() -> Iterator[_ffi.Handle]:
    made = cudnn_jax.create_handle()
    yield made
    torch.cuda.synchronize()
    cudnn_jax.destroy_handle(made)


def test_torch_tensors(handle: _ffi.Handle) -> None:
    case = Attention()
    case.graph.execute(case.buffers(), case.workspace(), handle)
    case.check()
    assert hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), "torch lent no table: the slower way was tested"


def test_without_a_handle() -> None:
    case = Attention()
    case.graph.execute(case.buffers(), case.workspace())
    case.check()


def test_jax_inputs_that_are_not_ready(handle: _ffi.Handle) -> None:
    case = Attention()
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, y: y + jnp.tanh(y @ jnp.ones((DIM, DIM))) * 0, x))
    device = jax.local_devices(backend="cuda")[0]
    inputs = [slow(jax.device_put(np.asarray(x.float().cpu()), device)).astype(jnp.bfloat16) for x in case.arrays]
    case.graph.execute(case.buffers(*inputs, case.out), case.workspace(), handle)
    case.check()
    with pytest.raises(ValueError, match=r"tensor 'o' .*jax.Array, which is immutable"):
        case.graph.execute(case.buffers(*inputs, inputs[0]), case.workspace(), handle)


def test_views_and_addresses(handle: _ffi.Handle) -> None:
    case = Attention()
    tensors = (*case.arrays, case.out)
    views = [cudnn_jax.DeviceView(x.data_ptr(), SHAPE, torch.bfloat16, device=0, owner=x) for x in tensors]
    workspace = case.workspace()
    address = 0 if workspace is None else workspace.data_ptr()
    case.graph.execute(case.buffers(*views), address or None, handle)
    case.check()
    case.out.fill_(float("nan"))
    case.graph.execute(case.buffers(*(x.data_ptr() for x in tensors)), address or None, handle)
    case.check()
    taken = torch.from_dlpack(views[0])
    assert taken.data_ptr() == case.arrays[0].data_ptr() and torch.equal(taken, case.arrays[0])


def test_a_producers_stream_is_waited_for(handle: _ffi.Handle) -> None:
    case = Attention()
    workspace = case.workspace()
    case.graph.execute(case.buffers(), workspace, handle)
    case.check()
    producing, running = torch.cuda.Stream(), torch.cuda.Stream()
    cudnn_jax.set_stream(handle, running)
    fresh = [torch.randn_like(x) for x in case.arrays]
    torch.cuda.synchronize()
    with torch.cuda.stream(producing):
        torch.cuda._sleep(100_000_000)
        for old, new in zip(case.arrays, fresh, strict=True):
            old.copy_(new)
        case.graph.execute(case.buffers(), workspace, handle)
    case.check()


def test_two_threads_on_two_streams() -> None:
    cases = [Attention(seed=seed) for seed in range(2)]
    graph = cases[0].graph
    start = threading.Barrier(2)
    failures: list[BaseException] = []

    def work(case: Attention) -> None:
        try:
            stream = torch.cuda.Stream()
            handle = cudnn_jax.create_handle(0, stream)
            workspace = cases[0].workspace()
            tensors = (cases[0].q, cases[0].k, cases[0].v, cases[0].o)
            start.wait()
            with torch.cuda.stream(stream):
                for _ in range(200):
                    buffers = dict(zip(tensors, (*case.arrays, case.out), strict=True))
                    graph.execute(buffers, workspace, handle)
            stream.synchronize()
            cudnn_jax.destroy_handle(handle)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(case,)) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for case in cases:
        case.check()


def test_a_backend_handle_made_elsewhere_is_used() -> None:
    case = Attention()
    owner = cudnn_jax.create_handle()
    wrapped = cudnn_jax.Handle(owner.backend_handle, 0, 0)
    case.graph.execute(case.buffers(), case.workspace(), wrapped)
    case.check()


def test_memory_of_the_cpu_is_refused(handle: _ffi.Handle) -> None:
    case = Attention()
    with pytest.raises(ValueError, match=r"tensor 'q' \(uid 1\): the graph runs on cuda:0, the buffer is on cpu"):
        case.graph.execute(case.buffers(case.arrays[0].cpu(), *case.arrays[1:], case.out), case.workspace(), handle)
    array = np.ones(SHAPE, np.float32)
    with pytest.raises(ValueError, match=r"tensor 'k' \(uid 2\): the graph runs on cuda:0, the buffer is on cpu"):
        case.graph.execute(case.buffers(case.arrays[0], array, *case.arrays[2:], case.out), case.workspace(), handle)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_another_device_of_the_kind_runs_the_same_graph_and_foreign_buffers_are_refused(handle: _ffi.Handle) -> None:
    here, there = Attention(0), Attention(1)
    here.graph.execute(here.buffers(), here.workspace(), handle)
    here.check()
    with pytest.raises(ValueError, match=r"the graph runs on cuda:0, the buffer is on cuda:1"):
        here.graph.execute(here.buffers(*there.arrays, there.out), here.workspace(), handle)
    other = cudnn_jax.create_handle(1)
    size = here.graph.get_workspace_size()
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda:1") if size else None
    here.graph.execute(here.buffers(*there.arrays, there.out), workspace, other)
    there.check()


def test_a_thread_without_a_context_and_one_with_a_foreign_one() -> None:
    """The work goes to the handle's device whatever the thread is bound to, which stays as it was."""
    cuda = ctypes.CDLL("libcuda.so.1")
    case = Attention()
    workspace = case.workspace()
    case.graph.execute(case.buffers(), workspace)
    case.check()
    seen: list[tuple[Any, Any]] = []

    def work(make_context: bool) -> None:
        foreign, current = ctypes.c_void_p(), ctypes.c_void_p()
        if make_context:
            device = ctypes.c_int()
            assert cuda.cuDeviceGet(ctypes.byref(device), torch.cuda.device_count() - 1) == 0
            # Of CUDA 12: no parameters; it is bound to this thread.
            assert cuda.cuCtxCreate_v2(ctypes.byref(foreign), 0, device) == 0
        case.graph.execute(case.buffers(), workspace)
        cuda.cuCtxGetCurrent(ctypes.byref(current))
        seen.append((foreign.value, current.value))
        if make_context:
            cuda.cuCtxDestroy_v2(foreign)

    for make_context in (False, True):
        case.out.fill_(float("nan"))
        torch.cuda.synchronize()
        thread = threading.Thread(target=work, args=(make_context,))
        thread.start()
        thread.join()
        case.check()
    assert len(seen) == 2 and all(before == after for before, after in seen)


def test_capture_into_a_graph_of_torch() -> None:
    case = Attention()
    workspace = case.workspace()
    stream = torch.cuda.Stream()
    handle = cudnn_jax.create_handle(0, stream)
    with torch.cuda.stream(stream):
        case.graph.execute(case.buffers(), workspace, handle)
    case.check()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded, stream=stream):
        case.graph.execute(case.buffers(), workspace, handle)
    for x in case.arrays:
        x.copy_(torch.randn_like(x))
    case.out.fill_(float("nan"))
    recorded.replay()
    case.check()


def test_facts_of_the_device_are_torchs() -> None:
    info, known = cudnn_jax.device_info(0), torch.cuda.get_device_properties(0)
    assert (info.name, info.sm, info.sm_count) == (
        known.name,
        10 * known.major + known.minor,
        known.multi_processor_count,
    )
    assert info.total_memory == known.total_memory and info.l2_bytes == known.L2_cache_size
    device = jax.local_devices(backend="cuda")[0]
    assert info.name == device.device_kind
