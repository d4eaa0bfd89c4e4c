"""Reduced-precision products are off inside and as they were outside."""

from __future__ import annotations

import pytest
import torch

from exllamav3.quant.precision import exact_float32_matmul


def settings():
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision


@pytest.mark.parametrize("outside", ["highest", "high", "medium"])
def test_the_setting_of_the_caller_comes_back(outside):
    torch.set_float32_matmul_precision(outside)
    try:
        before = settings()
        with exact_float32_matmul():
            assert settings() == ("ieee", "ieee")
        assert settings() == before
        assert torch.get_float32_matmul_precision() == outside
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_setting_comes_back_after_an_error():
    before = settings()
    with pytest.raises(RuntimeError, match="inside"), exact_float32_matmul():
        raise RuntimeError("inside")
    assert settings() == before
