"""Two CUDA devices that are not there: tensors of the CPU that say they lie on one, and Triton's own driver and
launchers over a library that hands each launch to the emulator (tests/ptx/libcuda.c).

What CUDA refuses raises: operations on tensors of several devices, waits of the host while a graph is captured,
launches on a device that the kernel was not loaded for. What the host waits for is noted in `waits`.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tests.ptx import driver, emulator

CPU = torch.device("cpu")
READS = {"item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy", "nonzero", "equal", "unique"}
"""Functions whose result the host needs."""

waits: list[str] = []
"""What the host waited for: reads of values, copies that are not queued."""

launches: list[tuple[str, int, int]] = []
"""(kernel, device, stream) of each launch."""

errors: list[BaseException] = []
_now = SimpleNamespace(device=0, capturing=False, streams={}, pinned=set(), count=0, loading=None, kernels=[])


# Tensors --------------------------------------------------------------------------------------------------------------


def device_of(x: Any) -> torch.device:
    """Return the device that is meant; "cuda" is the current one."""
    found = torch.device("cuda", x) if isinstance(x, int) else torch.device(x)
    return torch.device("cuda", _now.device) if found.type == "cuda" and found.index is None else found


def where(x: Tensor) -> torch.device:
    return x.__dict__.get("_pretended", CPU)


def put(x: Any, device: torch.device) -> Any:
    for tensor in (t for t in tree_leaves(x) if isinstance(t, Tensor)):
        tensor.__dict__["_pretended"] = device
    return x


def address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def wait(what: str) -> None:
    waits.append(what)
    if _now.capturing:
        raise RuntimeError(f"operation not permitted when stream is capturing: {what}")


def transfer(x: Tensor, there: torch.device, queued: bool, to: Tensor | None = None) -> None:
    """Note a copy between devices that the host waits for: the driver takes over 64 KiB of pageable memory."""
    here, host = where(x), to if there == CPU else x
    pinned = host is not None and address(host) in _now.pinned
    taken = here == CPU and x.nbytes <= 2**16 and not _now.capturing
    if CPU in (here, there) and not (queued and (pinned or taken)):
        wait(f"a copy of {x.nbytes} bytes from {here} to {there}")


class Pretend(TorchFunctionMode):
    """Results lie where their tensors lie, or where `device` says."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):  # fields, `grad` and `device` among them
            out = func(*args, **kwargs)
            new = name == "__get__" and isinstance(out, Tensor) and "_pretended" not in out.__dict__
            return put(out, where(args[0])) if new else out
        given, pinned = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
        if name in ("to", "cpu", "cuda"):
            return self.to(args[0], given or {"cpu": CPU, "cuda": "cuda"}.get(name), *args[1:], **kwargs)
        if name == "is_pinned":
            return address(args[0]) in _now.pinned
        if name == "pin_memory":
            func, given, pinned = torch.clone, CPU, True
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        places = {where(x) for x in tensors if x.ndim or where(x) != CPU}
        if name in ("copy_", "_foreach_copy_"):
            for to, x in [args[:2]] if name == "copy_" else zip(*args[:2], strict=True):
                if where(to) != where(x):
                    transfer(x, where(to), kwargs.get("non_blocking", False) or True in args[2:], to)
        elif len(places) > 1 and name not in ("__getitem__", "__setitem__", "backward") and not pinned:
            raise RuntimeError(f"{name}: tensors on {' and '.join(sorted(map(str, places)))}")
        elif places - {CPU} and (name in READS or len(places) > 1):
            wait(name)
        there = where(args[0]) if name == "copy_" else max(places, key=str, default=CPU)
        out = func(*args, **kwargs)
        if name != "_foreach_copy_":
            put(out, there if given is None else device_of(given))
        if pinned:
            _now.pinned.add(address(out))
        return out

    def to(self, x: Tensor, target: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return what Tensor.to, .cpu and .cuda do."""
        queued, dtype = kwargs.get("non_blocking", False) or True in args, kwargs.get("dtype")
        for a in (a for a in args if not isinstance(a, bool)):
            if isinstance(a, Tensor):
                target, dtype = where(a), a.dtype
            elif isinstance(a, torch.dtype):
                dtype = a
            else:
                target = a
        there = where(x) if target is None else device_of(target)
        if there != where(x):
            transfer(x, there, queued)
        elif not kwargs.get("copy") and dtype in (None, x.dtype):
            return x
        return put(Tensor.to(x, dtype or x.dtype, copy=True), there)


# torch.cuda -----------------------------------------------------------------------------------------------------------


class Stream:
    """A stream, or an event on one: launches are made at once, whichever it is."""

    def __init__(self, device: Any = None, priority: int = 0, number: int | None = None) -> None:
        _now.count += 1
        self.device = device_of("cuda" if device is None else device)
        self.cuda_stream = _now.count if number is None else number

    def wait_stream(self, other: Stream) -> None:
        pass

    def record_event(self, event: Any = None) -> Stream:
        return self

    def synchronize(self) -> None:
        wait("synchronize")


def current_stream(device: Any = None) -> Stream:
    there = device_of("cuda" if device is None else device)
    return _now.streams.get(there) or Stream(there, number=0)


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    with on_device(stream.device):
        before, _now.streams[stream.device] = _now.streams.get(stream.device), stream
        yield
        _now.streams[stream.device] = before


@contextmanager
def on_device(device: Any) -> Iterator[None]:
    before, _now.device = _now.device, device_of(device).index
    yield
    _now.device = before


@contextmanager
def capturing() -> Iterator[None]:
    """Refuse what a captured step may not do."""
    _now.capturing = True
    try:
        yield
    finally:
        _now.capturing = False


# The library ----------------------------------------------------------------------------------------------------------

WORD, POINTER = ctypes.c_uint, ctypes.c_void_p


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)
def load(name: bytes) -> int:
    """Return the number of the kernel that is being loaded."""
    ptx, metadata = _now.loading.asm["ptx"], _now.loading.metadata
    _, _, registers, spilled, threads = driver._Utilities().load_binary("", _now.loading.asm["cubin"], 0, 0)
    head = ptx[ptx.index(".entry") : ptx.index(")", ptx.index(".entry"))]
    types = [
        getattr(ctypes, f"c_{_CTYPES[kind[0]]}{kind[1:]}", ctypes.c_float)
        for kind in re.findall(r"\.param\s+\.(\w+)", head)
    ]
    _now.kernels.append(SimpleNamespace(
        kernel=emulator.Kernel(ptx), types=types, attributes={0: threads, 3: spilled, 4: registers},
        launched=(32 * metadata.num_warps, metadata.shared, 0), device=_now.device,
    ))  # fmt: skip
    return len(_now.kernels) if _now.kernels[-1].kernel.name == name.decode() else -1


_CTYPES = {"u": "uint", "b": "uint", "s": "int", "f": "float"}


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_int)
def attribute(function: int, which: int) -> int:
    return _now.kernels[function - 1].attributes.get(which, 0)


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, *[WORD] * 5, ctypes.c_uint64, WORD, ctypes.POINTER(POINTER))
def launch(function: int, x: int, y: int, z: int, block: int, shared: int, stream: int, count: int, params: Any) -> int:
    one = _now.kernels[function - 1]
    try:
        assert (block, shared, count) == one.launched, "launched otherwise than compiled"
        assert one.device == _now.device, f"loaded for device {one.device}, launched on {_now.device}"
        values = [ctypes.cast(params[k], ctypes.POINTER(kind)).contents.value for k, kind in enumerate(one.types)]
        assert not any(values[-2:]), "scratch memory was given"  # the last two arguments are Triton's
        launches.append((one.kernel.name, _now.device, stream))
        one.kernel.run((x, y, z), values[:-2], shared, live=driver.live, races=driver.races)
    except BaseException as error:  # nothing is raised through C
        errors.append(error)
        return 719
    return 0


def install(capability: int = 90) -> None:
    """Pretend from now on, in this process."""
    importlib.import_module("torch._dynamo")  # reads torch.cuda when it is imported
    from triton.backends.nvidia.driver import CudaDriver
    from triton.compiler import CompiledKernel
    from triton.runtime import driver as active

    from optgen.runtime.modes import release

    os.environ["TRITON_LIBCUDA_PATH"] = folder = tempfile.mkdtemp(prefix="libcuda")
    path, source = os.path.join(folder, "libcuda.so.1"), Path(__file__).with_name("libcuda.c")
    named = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([os.environ.get("CC", "cc"), *named, "-o", path, source], check=True)
    library = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    library.pretend(*(ctypes.cast(call, POINTER) for call in (launch, attribute, load)))
    _pretend_torch(capability)
    cuda, plain, complete = CudaDriver(), CompiledKernel._init_handles, release.Release.complete
    cuda.get_current_device = lambda: _now.device
    cuda.get_device_capability = lambda device=None: divmod(capability, 10)
    cuda.get_current_stream = lambda device: current_stream(device).cuda_stream
    active.set_active(cuda)

    def loading(self: Any) -> None:
        _now.loading = self
        plain(self)

    def within(self: Any, p: Tensor) -> Any:  # hooks of a backward pass are called outside of the mode
        with Pretend():
            return complete(self, p)

    CompiledKernel._init_handles, release.Release.complete = loading, within
    Pretend().__enter__()


def _pretend_torch(capability: int) -> None:
    plain, made = torch._C.TensorBase.grad, torch.nn.Parameter.__new__

    def quiet(f: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            with torch._C.DisableTorchFunction():
                return f(*given)

        return call

    def grad(x: Tensor) -> Any:
        found = quiet(plain.__get__)(x)
        return found if found is None or "_pretended" in found.__dict__ else put(found, where(x))

    def parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        return put(made(cls, data, requires_grad), CPU if data is None else where(data))

    driver.live = quiet(driver.live)
    torch.nn.Parameter.__new__ = staticmethod(parameter)
    fields: dict[str, Any] = {
        "device": property(where), "is_cuda": property(lambda x: where(x) != CPU), "data_ptr": quiet(driver._note),
        "grad": property(grad, quiet(plain.__set__), quiet(plain.__delete__)),
        "get_device": lambda x: -1 if where(x) == CPU else where(x).index, "record_stream": lambda x, stream: None,
    }  # fmt: skip
    functions: dict[str, Any] = {
        "is_available": lambda: True, "_initialized": True, "is_initialized": lambda: True, "device_count": lambda: 2,
        "current_device": lambda: _now.device, "get_device_capability": lambda device=None: divmod(capability, 10),
        "is_current_stream_capturing": lambda: _now.capturing, "current_stream": current_stream, "stream": on_stream,
        "Stream": Stream, "device": on_device, "synchronize": lambda device=None: wait("synchronize"),
        "mem_get_info": lambda device=None: (2**37, 2**37),
    }  # fmt: skip
    for thing, values in ((Tensor, fields), (torch.cuda, functions)):
        for name, value in values.items():
            setattr(thing, name, value)
