"""Hessian capture by label, and the automatic rule for output scales."""

from __future__ import annotations

import pytest
import torch
from exllamav3.conversion.capture import HessianCapture, sensitive_mlps, use_output_scales
from exllamav3.conversion.replicas import Replicas
from tiny_models import llama_config, random_tensors

from exllamav3.architecture.decoder import build_decoder
from exllamav3.architecture.table import read_spec
from exllamav3.codec.params import Codebook
from exllamav3.model.config import Config
from exllamav3.modules.context import ForwardContext
from exllamav3.modules.module import DictSource
from exllamav3.quant import QuantSettings, quantize_linear

LABELS = {"block.attn.input", "block.attn.o", "block.mlp.input", "block.mlp.down"}


@pytest.fixture(scope="module")
def source() -> DictSource:
    return DictSource(random_tensors(llama_config()))


def replicas(devices: int) -> Replicas:
    spec = read_spec(Config(llama_config()))
    return Replicas(lambda: build_decoder(spec), [torch.device("cpu")] * devices)


def block_rows(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 128, generator=generator) for _ in range(count)]


def capture(source: DictSource, devices: int, rows: list[torch.Tensor]) -> HessianCapture:
    models = replicas(devices)
    models.load(1, source)
    captures = [HessianCapture(LABELS, device) for device in models.devices]
    finite, kept = models.observe(1, rows, captures, 3)
    assert finite == [True] * len(rows)
    assert len(kept) == 3
    for other in captures[1:]:
        captures[0].merge(other)
    return captures[0]


def test_linears_that_share_an_input_are_counted_once(source):
    found = capture(source, 1, block_rows(7))
    assert found.accumulators.keys() == LABELS
    for label in LABELS:
        assert found.accumulators[label].finish(0).count == 7 * 16


def test_the_hessian_is_the_mean_outer_product_of_the_input(source):
    rows = block_rows(4)
    found = capture(source, 1, rows)
    models = replicas(1)
    models.load(1, source)
    x = torch.cat([models.primary[1].modules[0].forward(row[None], None)[0] for row in rows])
    expected = x.T @ x / x.shape[0]
    made = found.accumulators["block.attn.input"].finish(0).matrix
    assert torch.allclose(made, expected, rtol=1e-4, atol=1e-5)


def test_several_devices_give_the_same_hessian_up_to_rounding(source):
    rows = block_rows(7)
    one, three = capture(source, 1, rows), capture(source, 3, rows)
    for label in LABELS:
        a, b = (c.accumulators[label].finish(0) for c in (one, three))
        assert a.count == b.count
        assert torch.allclose(a.matrix, b.matrix, rtol=1e-4, atol=1e-5)


def test_several_devices_return_rows_in_order(source):
    rows = block_rows(7)
    one, three = replicas(1), replicas(3)
    one.load(1, source)
    three.load(1, source)
    for a, b in zip(one.forward(1, rows), three.forward(1, rows), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_a_row_that_becomes_infinite_is_reported(source):
    rows = block_rows(5)
    rows[3] = torch.full_like(rows[3], float("inf"))
    models = replicas(2)
    models.load(1, source)
    captures = [HessianCapture(LABELS, device) for device in models.devices]
    finite, _ = models.observe(1, rows, captures, 2)
    assert finite == [True, True, True, False, True]


def test_advancing_gives_what_forward_gives_in_the_memory_of_the_rows(source):
    rows = block_rows(5)
    rows[3][0, 0] = float("nan")
    models = replicas(2)
    models.load(1, source)
    expected = models.forward(1, rows)
    moved, finite = models.advance(1, rows)
    assert finite == [True, True, True, False, True]
    for row, output, wanted in zip(rows, moved, expected, strict=True):
        assert output is row
        assert torch.equal(output, wanted) or output.isnan().any()


def test_advancing_token_ids_leaves_them_alone(source):
    ids = [torch.arange(16), torch.arange(16) + 3]
    models = replicas(1)
    models.load(0, source)
    moved, finite = models.advance(0, ids)
    assert finite == [True, True]
    assert torch.equal(ids[1], torch.arange(16) + 3)
    assert all(torch.equal(a, b) for a, b in zip(moved, models.forward(0, ids), strict=True))


def test_sensitivities_equal_those_of_autograd(source):
    models = replicas(1)
    models.load(1, source)
    block = models.primary[1]
    (mlp,) = sensitive_mlps(block, {f"{block.key}.mlp.gate_proj": "auto"})
    x = torch.randn(1, 9, 128, generator=torch.Generator().manual_seed(2))
    mlp.add(x)
    found = mlp.finish()
    gate = mlp.mlp.gate_proj.forward(x, mlp_context(x)).detach().requires_grad_()
    up = mlp.mlp.up_proj.forward(x, mlp_context(x)).detach().requires_grad_()
    (torch.nn.functional.silu(gate) * up).sum().backward()
    reach = (mlp.mlp.down_proj.weight**2).sum(0)
    for linear, leaf in ((mlp.mlp.gate_proj, gate), (mlp.mlp.up_proj, up)):
        expected = (leaf.grad**2).mean((0, 1)) * reach
        assert torch.allclose(found[linear.key], expected, rtol=1e-4)


def mlp_context(x: torch.Tensor) -> ForwardContext:
    return ForwardContext.uncached(x.shape[0], x.shape[1])


def test_nothing_is_measured_unless_a_projection_asks_for_auto():
    block = replicas(1).primary[1]
    assert sensitive_mlps(block, {f"{block.key}.mlp.gate_proj": "always"}) == []


def test_the_scale_rule():
    weight = torch.ones(4, 8) * torch.tensor([1.0, 1.0, 1.0, 3.0])[:, None]
    on_large, on_small = torch.tensor([1.0, 1, 1, 9]), torch.tensor([9.0, 9, 9, 1])
    assert use_output_scales("always", weight, on_large)
    assert not use_output_scales("never", weight, on_small)
    assert use_output_scales("auto", weight, None)
    assert use_output_scales("auto", weight, on_small)
    assert not use_output_scales("auto", weight, on_large)
    assert use_output_scales("auto", weight, torch.ones(4))


@pytest.mark.parametrize("power", [-1.0, 0.0, 0.5, 0.9, 1.1, 1.5, 2.0])
def test_automatic_scales_are_those_with_the_smaller_error(power):
    """Predicted and measured error meet where the sensitivity grows like the size itself."""
    random = torch.Generator().manual_seed(3)
    spread = torch.exp(0.5 * torch.randn(256, generator=random))
    weight_KN = torch.randn(128, 256, generator=random) * spread
    sensitivity = weight_KN.square().mean(0).sqrt() ** power
    chosen = use_output_scales("auto", weight_KN.t(), sensitivity)
    assert chosen == (power < 1)
    errors = {}
    for out_scales in (True, False):
        settings = QuantSettings(3, Codebook.MUL1, out_scales, 0)
        made, _ = quantize_linear(weight_KN, None, settings)
        error_N = (made.reconstruct() - weight_KN).square().sum(0)
        errors[out_scales] = float((sensitivity * error_N).sum())
    assert errors[chosen] < 1.03 * errors[not chosen]
