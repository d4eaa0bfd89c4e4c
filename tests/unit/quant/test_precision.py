"""Reduced-precision products are off inside and as they were outside."""

from __future__ import annotations

import threading

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


def test_blocks_of_two_threads_may_overlap():
    """The first to end must not switch the other's exactness off, nor the last leave it on."""
    torch.set_float32_matmul_precision("high")
    before = settings()
    entered, leave = threading.Event(), threading.Event()

    def other():
        with exact_float32_matmul():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    try:
        with exact_float32_matmul():
            thread.start()
            assert entered.wait(10)
        assert settings() == ("ieee", "ieee")
        leave.set()
        thread.join()
        assert settings() == before
    finally:
        torch.set_float32_matmul_precision("highest")
