"""A Triton driver for a GPU that is not there: kernels are compiled for it, and their PTX is executed on CPU tensors.

`install()` makes it the driver of this process, which must not have TRITON_INTERPRET=1. Triton's own launches, and
optgen's with their tables, run unchanged.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import CompiledKernel
from triton.runtime import driver

from tests.ptx import emulator


@dataclass
class Loaded:
    """A kernel on the absent device: its texts, and decoded PTX."""

    ptx: str
    cubin: bytes
    kernel: emulator.Kernel

    def tool(self, name: str, *options: str) -> str:
        """Return what a tool of NVIDIA's says about its machine code."""
        path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            return subprocess.run([path, *options, file.name], capture_output=True, text=True, check=True).stdout


LOADED: dict[str, Loaded] = {}
"""Hash that Triton gives to a compiled kernel -> the kernel."""

edit: Callable[[str], str] = str
"""Changes the PTX of kernels that are loaded from now on: for seeded defects."""

assembled = int(os.environ.get("OPTGEN_ASSEMBLED", "1"))
"""One kernel of so many goes through the assembler: a third of the time, and needless to execute PTX. Others are taken
to spill nothing, and need a TRITON_CACHE_DIR of their own, since Triton's keys do not tell them."""

races = bool(os.environ.get("OPTGEN_RACES"))
"""Whether launches look for races, which takes many times longer."""

_storages: dict[int, int] = {}
"""Where memory of CPU tensors begins and ends: of those whose address was asked for since all were looked for."""

_sorted: emulator.Ranges | None = None


def _note(x: torch.Tensor) -> int:
    """Tensor.data_ptr, which keeps in mind what lies there: a kernel's tables are made of such addresses."""
    global _sorted
    storage = x.untyped_storage()
    if storage.device.type == "cpu" and _storages.get(begin := storage.data_ptr()) != begin + storage.nbytes():
        if len(_storages) > 1000:  # much of it may be free by now
            _storages.clear()
        _storages[begin], _sorted = begin + storage.nbytes(), None
    return torch._C.TensorBase.data_ptr(x)


def drawn(ptx: str, of: int) -> bool:
    """Return True for one text of so many, the same ones each time."""
    return zlib.crc32(ptx.encode()) % of == 0


def live(again: bool) -> emulator.Ranges:
    """Return where storages of tensors on the CPU begin and end, as they are known, or looked up anew (0.1 s)."""
    global _sorted
    if again:
        _storages.clear()
        for x in gc.get_objects():
            if type(x) in (torch.Tensor, torch.nn.Parameter):
                x.data_ptr()
    if _sorted is None:
        ordered = np.array(sorted({(1, 1), *_storages.items()}), np.uint64)
        _sorted = ordered[:, 0], ordered[:, 1]
    return _sorted


class _Utilities:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "max_num_regs": 65536, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Return (module, function, registers, bytes of stack, most threads)."""
        if not cubin:
            return 1, 1, 32, 0, 1024
        usage = Loaded("", cubin, None).tool("cuobjdump", "-res-usage")  # type: ignore[arg-type]
        words = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
        return 1, 1, words["REG"], max(words["STACK"], words["LOCAL"]), 1024

    def unload_module(self, module: int) -> None:
        pass


class _Launcher:
    def __init__(self, source: Any, metadata: Any) -> None:
        self.signature, self.metadata = source.signature, metadata

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: int, packed: Any, launch: Any, enter: Any, leave: Any,
        *given: Any,
    ) -> None:  # fmt: skip
        arguments = [v for kind, value in zip(self.signature.values(), given, strict=True) for v in _flat(kind, value)]
        LOADED[self.metadata.hash].kernel.run((x, y, z), arguments, self.metadata.shared, live=live, races=races)


def _flat(kind: Any, value: Any) -> list[int | float]:
    """The values that a kernel gets for an argument of that type."""
    if isinstance(kind, tuple):
        return [v for inner, part in zip(kind, value, strict=True) for v in _flat(inner, part)]
    if kind == "constexpr":
        return []
    if kind.startswith("*"):
        return [value.data_ptr() if hasattr(value, "data_ptr") else int(value)]
    return [float(value) if kind.startswith(("fp", "bf")) else int(value)]


class EmulatedDriver(DriverBase):
    """The driver of devices whose number is their capability, such as 90: Triton keeps kernels for each number."""

    launcher_cls = _Launcher
    capability = 90

    def __init__(self) -> None:
        self.utils = _Utilities()
        self.get_current_device = lambda: self.capability
        self.get_current_stream = lambda device: 0

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("an emulated kernel has no speed")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty


def use(capability: int) -> None:
    """Compile for devices of that capability from now on."""
    EmulatedDriver.capability = capability


def install(capability: int = 90) -> None:
    """Make it the driver of this process, and let optgen launch Triton kernels on CPU tensors, with the limits of
    registers that such a device gets."""
    from optgen.runtime.step import backends, launch

    use(capability)
    driver.set_active(EmulatedDriver())
    plain, assemble = CompiledKernel._init_handles, CUDABackend.make_cubin

    def load(self: Any) -> None:
        if self.metadata.hash not in LOADED:
            ptx = edit(self.asm["ptx"])
            LOADED[self.metadata.hash] = Loaded(ptx, self.asm["cubin"], emulator.Kernel(ptx))
        plain(self)

    CompiledKernel._init_handles = load
    CUDABackend.make_cubin = lambda self, ptx, *given: assemble(self, ptx, *given) if drawn(ptx, assembled) else b""
    torch.Tensor.data_ptr = _note
    backends.interpreted = lambda: True
    launch._limits = lambda kernels, device, function: launch.limits(kernels, function, EmulatedDriver.capability // 10)
