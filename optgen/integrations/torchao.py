"""torchao's tensors in the memory of views."""

from __future__ import annotations

from typing import Any

import torch

from optgen.integrations import framework


def mx_tensor(view: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a view of `opt.views(p)` as torchao's MXTensor, in the same memory; it reads as numbers of `dtype`."""
    mx = framework("torchao.prototype.mx_formats.mx_tensor")
    how = framework("torchao.quantization.quantize_.common.kernel_preference").KernelPreference.AUTO
    return mx.MXTensor(view.codes, view.scales, view.codes.dtype, 32, dtype, how, None, False)
