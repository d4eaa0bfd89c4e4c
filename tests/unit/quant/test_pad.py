"""From checkpoint orientation to padded (k, n), and fused q, k, v."""

from __future__ import annotations

import pytest
import torch

from exllamav3.errors import FormatError
from exllamav3.quant import concat_qkv, pad_weight, split_qkv


def test_a_weight_is_transposed_and_padded_at_the_high_end():
    weight = torch.randn(200, 130).to(torch.bfloat16)
    padded, bias = pad_weight(weight, torch.ones(200))
    assert padded.shape == (256, 256)
    assert padded.dtype == torch.bfloat16
    assert torch.equal(padded[:130, :200], weight.T)
    assert not padded[130:].any()
    assert not padded[:, 200:].any()
    assert torch.equal(bias, torch.cat([torch.ones(200), torch.zeros(56)]))


def test_whole_blocks_are_not_padded():
    padded, bias = pad_weight(torch.ones(256, 128))
    assert padded.shape == (128, 256)
    assert padded.is_contiguous()
    assert bias is None


def test_fused_parts_come_back_bit_for_bit():
    parts = [torch.randn(rows, 96).to(torch.bfloat16) for rows in (192, 64, 64)]
    fused = concat_qkv(parts)
    assert fused.shape == (320, 96)
    for part, back in zip(parts, split_qkv(fused, [192, 64, 64]), strict=True):
        assert torch.equal(part, back)


def test_fused_matrices_are_padded_once_at_the_end():
    parts = [torch.ones(rows, 128) * (i + 1) for i, rows in enumerate((192, 64, 100))]
    padded, _ = pad_weight(concat_qkv(parts))
    assert padded.shape == (128, 384)
    assert torch.equal(padded[0].unique_consecutive(), torch.tensor([1.0, 2.0, 3.0, 0.0]))
    for part, back in zip(parts, split_qkv(padded.T, [192, 64, 100]), strict=True):
        assert torch.equal(part, back)


def test_biases_are_fused_the_same_way():
    fused = concat_qkv([torch.ones(3), torch.zeros(2), torch.ones(1)])
    assert torch.equal(fused, torch.tensor([1.0, 1, 1, 0, 0, 1]))


@pytest.mark.parametrize(
    "parts",
    [
        [torch.ones(4, 8)] * 2,
        [torch.ones(4, 8), torch.ones(4, 8), torch.ones(4, 9)],
        [torch.ones(4, 8), torch.ones(4, 8), torch.ones(4, 8).half()],
        [torch.ones(4, 8), torch.ones(4, 8), torch.ones(4)],
    ],
    ids=["two parts", "widths differ", "dtypes differ", "weight and bias"],
)
def test_parts_that_do_not_belong_together_are_refused(parts):
    with pytest.raises(FormatError, match="expected three"):
        concat_qkv(parts)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(FormatError, match=r"expected a floating point \(out, in\) matrix"):
        pad_weight(torch.ones(3))
    with pytest.raises(FormatError, match=r"bias has shape \(5,\), expected \(4,\)"):
        pad_weight(torch.ones(4, 8), torch.ones(5))
    with pytest.raises(FormatError, match="do not fit into 4 rows"):
        split_qkv(torch.ones(4, 8), [2, 2, 1])
