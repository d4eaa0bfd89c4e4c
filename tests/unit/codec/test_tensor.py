"""A quantized weight as a value: what is accepted, what is written, slices."""

import pytest
import torch

from exllamav3.codec.params import Codebook
from exllamav3.codec.tensor import Exl3Tensor, is_exl3, marker_tensor
from exllamav3.errors import FormatError

KEY = "model.layers.0.self_attn.q_proj"


def make_weight(k=256, n=384, bits=4, codebook=Codebook.MUL1, bias=False) -> Exl3Tensor:
    generator = torch.Generator().manual_seed(int(2 * bits))
    shape = (k // 16, n // 16, int(16 * bits))
    return Exl3Tensor(
        torch.randint(-32768, 32768, shape, generator=generator).to(torch.int16),
        torch.randn(k, generator=generator).half(),
        torch.randn(n, generator=generator).half(),
        codebook,
        torch.randn(n, generator=generator).half() if bias else None,
    )


def test_sizes_and_rate_come_from_the_trellis():
    weight = make_weight(bits=2.5)
    assert (weight.in_features, weight.out_features, weight.bits) == (256, 384, 2.5)
    assert isinstance(make_weight(bits=3).bits, int)
    assert weight.device == torch.device("cpu")


@pytest.mark.parametrize("codebook", list(Codebook))
@pytest.mark.parametrize("bias", [False, True])
def test_a_weight_survives_being_written_and_read(codebook, bias):
    weight = make_weight(codebook=codebook, bias=bias)
    tensors = weight.to_tensors(KEY)
    suffixes = {name.removeprefix(f"{KEY}.") for name in tensors}
    markers = set() if codebook is Codebook.INST3 else {codebook.value}
    assert suffixes == {"trellis", "suh", "svh"} | markers | ({"bias"} if bias else set())
    again = Exl3Tensor.from_tensors(KEY, tensors)
    assert again.codebook is codebook
    assert torch.equal(again.trellis_IOW, weight.trellis_IOW)
    assert (again.bias_N is None) is not bias


@pytest.mark.parametrize(
    ("codebook", "value"), [(Codebook.MCG, -877912083), (Codebook.MUL1, -2082680531)]
)
def test_markers_are_int32_scalars_of_the_documented_value(codebook, value):
    marker = marker_tensor(codebook)
    assert (marker.dtype, marker.shape, int(marker)) == (torch.int32, (), value)


def test_forward_is_the_product_with_the_reconstruction():
    weight = make_weight(bias=True)
    x = torch.randn(2, 3, 256)
    expected = x @ weight.reconstruct() + weight.bias_N.float()
    torch.testing.assert_close(weight.forward(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 255), r"x has shape \(2, 255\), expected \(\.\.\., 256\)"),
        (torch.zeros(2, 256).double(), "x is float64"),
        (torch.zeros(2, 256, device="meta"), "x is on meta, expected cpu"),
    ],
)
def test_forward_refuses_an_input_that_does_not_fit(x, message):
    with pytest.raises(FormatError, match=message):
        make_weight().forward(x)


@pytest.mark.parametrize("bits", [1, 3, 8])  # both ends and an odd width
def test_columns_cut_at_a_hadamard_block_are_a_weight_of_their_own(bits):
    """Output blocks are independent: so the parts of a fused weight can be told apart."""
    whole = make_weight(bits=bits, bias=True)
    part = Exl3Tensor(
        whole.trellis_IOW[:, 128 // 16 :],
        whole.suh_K,
        whole.svh_N[128:],
        whole.codebook,
        whole.bias_N[128:],
    )
    assert torch.equal(part.reconstruct(), whole.reconstruct()[:, 128:])
    assert all(tensor.is_contiguous() for tensor in part.to_tensors(KEY).values())


def test_legacy_signs_are_read():
    weight = make_weight(codebook=Codebook.INST3)
    tensors = weight.to_tensors(KEY)
    del tensors[f"{KEY}.suh"]
    packed = torch.zeros(16, dtype=torch.int16)
    packed[1] = -32768 + 5  # bits 0, 2 and 15: channels 16, 18 and 31
    tensors[f"{KEY}.su"] = packed
    signs = Exl3Tensor.from_tensors(KEY, tensors).suh_K
    assert signs.dtype == torch.float16
    assert (signs == -1).nonzero().flatten().tolist() == [16, 18, 31]
    assert (signs == 1).sum() == 253


def test_a_float32_bias_is_rounded_to_float16():
    tensors = make_weight(bias=True).to_tensors(KEY)
    tensors[f"{KEY}.bias"] = tensors[f"{KEY}.bias"].float()
    assert Exl3Tensor.from_tensors(KEY, tensors).bias_N.dtype == torch.float16


@pytest.mark.parametrize("marker", [torch.zeros(1), torch.zeros(2, dtype=torch.int32)])
def test_a_marker_of_another_form_selects_the_codebook_unchecked(marker):
    tensors = make_weight(codebook=Codebook.INST3).to_tensors(KEY)
    tensors[f"{KEY}.mcg"] = marker
    assert Exl3Tensor.from_tensors(KEY, tensors).codebook is Codebook.MCG


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trellis": None}, r"q_proj\.trellis is missing"),
        ({"suh": None}, r"q_proj\.suh is missing"),
        ({"svh": None}, r"q_proj\.svh is missing"),
        ({"suh": torch.zeros(255).half()}, r"suh: shape is \(255,\), expected \(256,\)"),
        ({"svh": torch.zeros(384)}, r"svh: dtype is torch\.float32, expected torch\.float16"),
        ({"bias": torch.zeros(1).half()}, r"bias: shape is \(1,\), expected \(384,\)"),
        ({"mcg": torch.zeros(())}, "has both markers"),
        ({"mul1": torch.tensor(1, dtype=torch.int32)}, "marker value is 1, expected -2082680531"),
        ({"trellis": torch.zeros(16, 24, 61, dtype=torch.int16)}, "last dimension is 61"),
        ({"trellis": torch.zeros(16, 24, dtype=torch.int16)}, r"expected \(k/16, n/16, 16\*K\)"),
        ({"trellis": torch.zeros(9, 24, 64, dtype=torch.int16)}, "has 144 input channels"),
        ({"trellis": torch.zeros(16, 3, 64, dtype=torch.int16)}, "has 48 output channels"),
        ({"trellis": torch.zeros(16, 24, 24, dtype=torch.int16), "mul1": None}, "mul1 only"),
        ({"suh": None, "su": torch.zeros(16)}, r"su: dtype is torch\.float32"),
        ({"suh": None, "su": torch.zeros(15, dtype=torch.int16)}, r"suh: shape is \(240,\)"),
        ({"suh": torch.full((256,), torch.nan).half()}, r"q_proj\.suh: holds values that are not"),
        ({"svh": torch.full((384,), torch.inf).half()}, r"q_proj\.svh: holds values that are not"),
        ({"bias": torch.full((384,), torch.nan).half()}, r"q_proj\.bias: holds values that are"),
    ],
)
def test_damaged_tensors_are_refused_by_name(change, message):
    tensors = make_weight().to_tensors(KEY)
    for suffix, tensor in change.items():
        if tensor is None:
            del tensors[f"{KEY}.{suffix}"]
        else:
            tensors[f"{KEY}.{suffix}"] = tensor
    with pytest.raises(FormatError, match=message):
        Exl3Tensor.from_tensors(KEY, tensors)


@pytest.mark.parametrize(
    ("suffixes", "expected"),
    [
        (("trellis", "suh", "svh"), True),
        (("trellis", "su", "sv"), True),
        (("trellis", "suh"), False),
        (("suh", "svh"), False),
        (("weight",), False),
    ],
)
def test_storage_form_is_decided_by_names(suffixes, expected):
    assert is_exl3("a", {f"a.{suffix}" for suffix in suffixes}) is expected
