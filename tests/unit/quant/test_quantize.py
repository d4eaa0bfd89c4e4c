"""`quantize_linear` from end to end on small weights."""

from __future__ import annotations

import pytest
import torch
from quant_material import correlated_rows, uneven_weight

from exllamav3.codec.params import Codebook
from exllamav3.errors import FormatError
from exllamav3.quant import QuantSettings, chunks, make_hessian, pad_weight, quantize_linear
from exllamav3.quant.ldl import block_ldl
from exllamav3.quant.ldlq import quantize_with_feedback
from exllamav3.quant.metrics import decoded_columns

FOUR_BITS = QuantSettings(bits=4, codebook=Codebook.MUL1, out_scales=True, seed=0)


def hessian_of(k, seed=0, live=None):
    x = correlated_rows(4 * k, k, seed)
    if live is not None:
        x[:, live:] = 0
    return make_hessian(x.T @ x / len(x), len(x), seed)


def proxy_in_float64(weight, tensor, hessian):
    """tr(E^T H E) / tr(W^T H W) of what a reader of the file decodes."""
    error = (weight.float() - tensor.reconstruct()).double()
    source, matrix = weight.double(), hessian.matrix.double()
    return float((error * (matrix @ error)).sum() / (source * (matrix @ source)).sum())


@pytest.mark.parametrize("codebook", list(Codebook))
def test_the_report_is_that_of_the_stored_tensor(codebook):
    weight, hessian = uneven_weight(256, 128, seed=0).to(torch.bfloat16), hessian_of(256)
    settings = QuantSettings(3, codebook, out_scales=True, seed=1)
    tensor, report = quantize_linear(weight, hessian, settings)
    assert tensor.bits == 3
    assert tensor.codebook is codebook
    assert report.proxy_error == pytest.approx(proxy_in_float64(weight, tensor, hessian), rel=0.01)
    error = weight.double() - tensor.reconstruct().double()
    assert report.rmse == pytest.approx(float(error.norm() / weight.double().norm()), rel=1e-4)
    assert not report.fallback
    assert not report.zeros
    # A Gaussian source at 3 bits and this codec: about 0.0176, less where feedback helps.
    assert report.proxy_error < 0.016


def test_the_stored_tensor_is_the_regularised_result_taken_back(monkeypatch):
    """The file decodes to diag(suh) P Q P diag(svh) with Q what the search returned."""
    from exllamav3.quant import quantize

    seen = {}

    def spy(weight_KN, inner_KN, *rest):
        seen["inner"] = inner_KN
        return original(weight_KN, inner_KN, *rest)

    original = quantize.weight_errors
    monkeypatch.setattr(quantize, "weight_errors", spy)
    tensor, _ = quantize_linear(uneven_weight(128, 128, seed=1), hessian_of(128), FOUR_BITS)
    expected = decoded_columns(seen["inner"], tensor.suh_K, tensor.svh_N, slice(0, None))
    torch.testing.assert_close(tensor.reconstruct(), expected, rtol=1e-4, atol=1e-7)


def test_the_same_arguments_give_the_same_bits_and_another_seed_others():
    weight, hessian = uneven_weight(128, 128, seed=2), hessian_of(128)
    tensors = [quantize_linear(weight, hessian, FOUR_BITS)[0].to_tensors("x") for _ in range(2)]
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    other, _ = quantize_linear(weight, hessian, QuantSettings(4, Codebook.MUL1, True, seed=1))
    assert not torch.equal(other.trellis_IOW, tensors[0]["x.trellis"])


def test_the_weight_and_the_hessian_are_not_changed(grid_tiles):
    weight, hessian = uneven_weight(128, 128, seed=3), hessian_of(128)
    before = weight.clone(), hessian.matrix.clone()
    quantize_linear(weight, hessian, FOUR_BITS)
    assert torch.equal(weight, before[0])
    assert torch.equal(hessian.matrix, before[1])


def test_feedback_is_better_than_the_fallback_under_the_metric():
    weight, hessian = uneven_weight(256, 128, seed=4), hessian_of(256)
    fed, report = quantize_linear(weight, hessian, FOUR_BITS)
    plain, plain_report = quantize_linear(weight, None, FOUR_BITS)
    assert report.proxy_error < 0.8 * proxy_in_float64(weight, plain, hessian)
    assert plain_report.proxy_error is None
    assert plain_report.fallback
    assert plain_report.rmse < 0.066  # sqrt(0.0044), what a Gaussian source allows
    assert fed.trellis_IOW.shape == plain.trellis_IOW.shape


@pytest.mark.parametrize("count", [0, 7])
def test_an_unusable_hessian_takes_the_fallback(grid_tiles, count):
    weight = uneven_weight(128, 128, seed=5)
    useless = make_hessian(torch.zeros(128, 128), count, seed=0)
    _, report = quantize_linear(weight, useless, FOUR_BITS)
    assert report.fallback
    assert report.proxy_error is None


@pytest.mark.parametrize("hessian", [None, hessian_of(128)])
def test_a_zero_weight_gives_exactly_zero(hessian):
    tensor, report = quantize_linear(torch.zeros(128, 256), hessian, FOUR_BITS, torch.ones(256))
    assert report.zeros
    assert report.proxy_error == 0.0
    assert report.rmse == 0.0
    assert not tensor.reconstruct().any()
    assert not tensor.svh_N.any()
    x = torch.randn(3, 128)
    assert torch.equal(tensor.forward(x), torch.ones(3, 256))


@pytest.mark.parametrize("out_scales", [True, False])
@pytest.mark.parametrize("calibrated", [True, False])
def test_zero_channels_decode_to_exact_zeros(grid_tiles, out_scales, calibrated):
    weight = uneven_weight(256, 256, seed=6)
    weight[:, 40:60] = 0
    weight[130:140] = 0
    hessian = hessian_of(256) if calibrated else None
    settings = QuantSettings(4, Codebook.MUL1, out_scales, seed=0)
    tensor, _ = quantize_linear(weight, hessian, settings)
    assert not tensor.svh_N[40:60].any()
    assert not tensor.suh_K[130:140].any()
    assert tensor.svh_N.count_nonzero() == 236
    assert tensor.suh_K.count_nonzero() == 246


def test_padding_costs_no_accuracy():
    """Half a block of padding on either side: as good as a weight of whole blocks."""
    weight_OI = uneven_weight(192, 192, seed=7)
    weight, _ = pad_weight(weight_OI)
    tensor, report = quantize_linear(weight, hessian_of(256, live=192), FOUR_BITS)
    whole, _ = pad_weight(uneven_weight(256, 256, seed=7))
    _, whole_report = quantize_linear(whole, hessian_of(256), FOUR_BITS)
    assert not tensor.reconstruct()[192:].any()
    assert not tensor.reconstruct()[:, 192:].any()
    assert report.proxy_error < 1.1 * whole_report.proxy_error


@pytest.mark.parametrize("share", [0.01, 0.1])
def test_rows_that_are_almost_zero_do_not_disturb_the_others(share):
    """Feedback must not ask a tiny row for corrections that it cannot hold."""
    weight, hessian = uneven_weight(256, 128, seed=15), hessian_of(256)
    _, usual = quantize_linear(weight, hessian, FOUR_BITS)
    generator = torch.Generator().manual_seed(0)
    weight[torch.rand(256, generator=generator) < share] *= 1e-3
    _, report = quantize_linear(weight, hessian, FOUR_BITS)
    assert report.proxy_error < 1.3 * usual.proxy_error


@pytest.mark.parametrize("size", [2.0**-22, 2.0**-9, 2.0**10, 2.0**18])
def test_accuracy_does_not_depend_on_the_size_of_the_weight(size):
    weight, hessian = uneven_weight(128, 128, seed=8), hessian_of(128)
    _, usual = quantize_linear(weight, hessian, FOUR_BITS)
    tensor, report = quantize_linear(weight * size, hessian, FOUR_BITS)
    assert report.proxy_error == pytest.approx(usual.proxy_error, rel=0.02)
    assert tensor.suh_K.isfinite().all()
    assert tensor.svh_N.isfinite().all()
    assert report.proxy_error == pytest.approx(
        proxy_in_float64(weight * size, tensor, hessian), rel=0.01
    )


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_a_weight_beyond_float16_scales_is_refused(grid_tiles, size):
    with pytest.raises(FormatError, match="do not fit float16"):
        quantize_linear(uneven_weight(128, 128, seed=9) * size, hessian_of(128), FOUR_BITS)


def test_cutting_into_column_ranges_gives_a_result_as_good(grid_tiles, monkeypatch):
    weight, hessian = uneven_weight(128, 512, seed=10), hessian_of(128)
    shares: list[float] = []
    whole, report = quantize_linear(weight, hessian, FOUR_BITS, progress=shares.append)
    assert shares == [1.0]
    shares.clear()
    monkeypatch.setattr(chunks, "CHUNK_WEIGHTS", 128 * 128)
    cut, cut_report = quantize_linear(weight, hessian, FOUR_BITS, progress=shares.append)
    assert shares == [0.25, 0.5, 0.75, 1.0]
    assert cut_report.proxy_error == pytest.approx(report.proxy_error, rel=0.01)
    assert cut_report.rmse == pytest.approx(report.rmse, rel=0.01)
    torch.testing.assert_close(cut.suh_K, whole.suh_K, rtol=0.01, atol=1e-4)


def test_columns_follow_a_permutation_of_blocks(grid_tiles, monkeypatch):
    """Moving whole 128-blocks of outputs moves their results; only rounding may differ."""
    from exllamav3.quant import regularize

    monkeypatch.setattr(regularize, "random_signs", lambda size, *_: torch.ones(size))
    weight, hessian = uneven_weight(128, 384, seed=11), hessian_of(128)
    straight, report = quantize_linear(weight, hessian, FOUR_BITS)
    rolled, rolled_report = quantize_linear(weight.roll(128, dims=1), hessian, FOUR_BITS)
    assert rolled_report.proxy_error == pytest.approx(report.proxy_error, rel=0.02)
    torch.testing.assert_close(rolled.svh_N.roll(-128), straight.svh_N, rtol=0.15, atol=0)


def test_the_bias_is_stored_in_float16(grid_tiles):
    bias = torch.linspace(-3, 3, 128)
    tensor, _ = quantize_linear(uneven_weight(128, 128, seed=12), None, FOUR_BITS, bias)
    assert torch.equal(tensor.bias_N, bias.half())


@pytest.mark.parametrize("bad", [torch.ones(64), torch.full((128,), 1e6)])
def test_a_bias_that_does_not_fit_is_refused(bad):
    with pytest.raises(FormatError, match=r"bias: .* expected \(128,\), finite in float16"):
        quantize_linear(torch.ones(128, 128), None, FOUR_BITS, bad)


@pytest.mark.parametrize("shape", [(100, 128), (128, 100), (128,), (0, 128)])
def test_unpadded_shapes_are_refused(shape):
    with pytest.raises(FormatError, match="multiples of 128; use pad_weight"):
        quantize_linear(torch.ones(shape), None, FOUR_BITS)


def test_a_hessian_of_another_width_is_refused():
    with pytest.raises(FormatError, match="Hessian over 256 channels"):
        quantize_linear(torch.ones(128, 128), hessian_of(256), FOUR_BITS)


def test_a_non_finite_weight_is_refused():
    weight = torch.ones(128, 128)
    weight[5, 6] = float("nan")
    with pytest.raises(FormatError, match=r"1 of 16384 values are not finite.*input 5, output 6"):
        quantize_linear(weight, None, FOUR_BITS)


@pytest.mark.parametrize("bits", [0, 9, 2.5, True])
def test_rates_that_are_not_written_are_refused(bits):
    with pytest.raises(FormatError, match="integer from 1 to 8"):
        QuantSettings(bits=bits, codebook=Codebook.MUL1)


def test_two_more_bits_are_worth_a_factor_of_ten():
    weight, hessian = uneven_weight(128, 128, seed=13), hessian_of(128)
    errors = []
    for bits in (2, 4, 6):
        _, report = quantize_linear(weight, hessian, QuantSettings(bits, Codebook.MUL1))
        errors.append(report.proxy_error)
    assert errors[0] > 10 * errors[1] > 100 * errors[2]


@pytest.mark.cuda
@pytest.mark.parametrize("bits", [2, 4])
def test_a_gpu_gives_the_accuracy_of_the_cpu(bits):
    weight, hessian = uneven_weight(256, 384, seed=14), hessian_of(256)
    settings = QuantSettings(bits, Codebook.MUL1)
    _, on_cpu = quantize_linear(weight, hessian, settings)
    tensor, on_gpu = quantize_linear(weight.cuda(), hessian.to("cuda"), settings)
    assert tensor.device.type == "cuda"
    assert on_gpu.proxy_error == pytest.approx(on_cpu.proxy_error, rel=0.03)
    decoded = proxy_in_float64(weight, tensor.to("cpu"), hessian)
    assert on_gpu.proxy_error == pytest.approx(decoded, rel=0.01)


@pytest.mark.cuda
def test_error_feedback_never_waits_for_the_gpu():
    target = torch.randn(512, 256, device="cuda")
    factor = block_ldl(torch.eye(512, device="cuda") + 0.001, 0.025)
    quantize_with_feedback(target, factor, 4, Codebook.MUL1)  # first use allocates and compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        quantize_with_feedback(target, factor, 4, Codebook.MUL1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_a_hessian_on_another_device_is_refused():
    with pytest.raises(FormatError, match="its Hessian on cpu"):
        quantize_linear(torch.ones(128, 128, device="cuda"), hessian_of(128), FOUR_BITS)
