"""The operators: checked wrappers over `torch.ops.exllamav3`, served by native code or torch.

Each wrapper validates its arguments and raises a readable `FormatError`; the kernels
behind it only guard memory. `status` says which code serves which device.
"""

from exllamav3.ops.codec import decode, pack, reconstruct, unpack
from exllamav3.ops.deinterleave import deinterleave_qg, deinterleave_qg_reference
from exllamav3.ops.delta_rule import advance_delta_rule, gated_delta_rule
from exllamav3.ops.hadamard import hadamard
from exllamav3.ops.linear import exl3_linear, exl3_linear_group
from exllamav3.ops.run_path import delta_inputs, gate_mul, norm_rotate, rms_norm
from exllamav3.ops.search import quantize_tiles
from exllamav3.ops.status import backend, build_info, require_device, require_native

__all__ = [
    "advance_delta_rule",
    "backend",
    "build_info",
    "decode",
    "deinterleave_qg",
    "deinterleave_qg_reference",
    "delta_inputs",
    "exl3_linear",
    "exl3_linear_group",
    "gate_mul",
    "gated_delta_rule",
    "hadamard",
    "norm_rotate",
    "pack",
    "quantize_tiles",
    "reconstruct",
    "require_device",
    "require_native",
    "rms_norm",
    "unpack",
]
