"""Quantizing one weight matrix: from a dense weight and its input statistics to EXL3.

Reading order: settings, hessian, pad, randomness, regularize, scale_search, ldl, ldlq, refit,
metrics, magnitude, quantize.
"""

from exllamav3.quant.hessian import Hessian, HessianAccumulator, make_hessian
from exllamav3.quant.pad import concat_qkv, pad_weight, split_qkv
from exllamav3.quant.quantize import quantize_linear
from exllamav3.quant.settings import QuantReport, QuantSettings

__all__ = [
    "Hessian",
    "HessianAccumulator",
    "QuantReport",
    "QuantSettings",
    "concat_qkv",
    "make_hessian",
    "pad_weight",
    "quantize_linear",
    "split_qkv",
]
