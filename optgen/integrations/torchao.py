"""torchao's tensors in the memory of views."""

from __future__ import annotations

from typing import Any

import torch

from optgen.integrations import framework


def mx_tensor(view: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a view of `opt.views(p)` as torchao's MXTensor, in the same memory; it reads as numbers of `dtype`.

    In a product torchao makes the other factor MXFP8, too.  Matrix units of sm_100 and later multiply, by
    torch._scaled_mm; other devices emulate it.
    """
    mx = framework("torchao.prototype.mx_formats.mx_tensor")
    kernels = framework("torchao.quantization.quantize_.common.kernel_preference").KernelPreference
    device = view.codes.device
    units = device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (10, 0)
    kernel = kernels.AUTO if units else kernels.EMULATED
    other = mx.QuantizeTensorToMXKwargs(view.codes.dtype, 32, mx.ScaleCalculationMode.RCEIL, kernel)
    return mx.MXTensor(view.codes, view.scales, view.codes.dtype, 32, dtype, kernel, other, False)


def scaled_tensor(view: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a view "fp8" or "nvfp4" as torchao's Float8Tensor or NVFP4Tensor, in the same memory, as `mx_tensor`."""
    if view.tensor is not None:
        nv = framework("torchao.prototype.mx_formats.nvfp4_tensor")
        return nv.NVFP4Tensor(view.codes.view(torch.uint8), view.scales, 16, dtype, view.tensor)
    scale, whole = view.scales.view((1,) * view.codes.ndim), list(view.codes.shape)
    return framework("torchao.quantization").Float8Tensor(view.codes, scale, whole, dtype=dtype)
