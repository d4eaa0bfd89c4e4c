"""The small steps between the linears, on either device, against float64 definitions."""

import pytest
import torch
from samples import random_input, relative_error

from exllamav3 import ops
from exllamav3.errors import FormatError

TYPES = [torch.float32, torch.float16, torch.bfloat16]
ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative error of a value rounded (twice, for torch's own products) to the dtype."""


def rms(x, scale, eps):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * scale.double()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 5120), (2, 3, 128), (5, 80), (3, 2, 4, 96), (9, 256), (2, 82)]
)
@pytest.mark.parametrize("gated", [False, True])
def test_rms_norm(device, dtype, shape, gated):
    x = random_input(*shape, device=device).to(dtype)
    scale = random_input(shape[-1], seed=2, device=device)
    gate = random_input(*shape, seed=3, device=device).half() if gated else None
    expected = rms(x, scale, 1e-6)
    if gate is not None:
        expected = expected * torch.nn.functional.silu(gate.double())
    for out in TYPES:
        y = ops.rms_norm(x, scale, 1e-6, gate, out)
        assert y.dtype == out
        assert relative_error(y, expected) < ROUNDING[out]


def rotated(x, cos, sin):
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = [first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]]
    return torch.cat(turned, -1)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("head_dim", "half"), [(256, 32), (64, 32), (80, 40), (10, 2)])
def test_norm_and_rotation_of_a_strided_view(device, dtype, normed, head_dim, half):
    fused = random_input(2, 3, 5 * head_dim, device=device).to(dtype)
    x = fused[..., head_dim : 4 * head_dim].unflatten(-1, (3, head_dim))
    scale = random_input(head_dim, seed=2, device=device) if normed else None
    angle = random_input(2, 3, 1, half, seed=4, device=device)
    y = ops.norm_rotate(x, scale, 1e-6, angle.cos(), angle.sin())
    assert (y.shape, y.dtype, y.is_contiguous()) == (x.shape, dtype, True)
    inner = x.double() if scale is None else rms(x, scale, 1e-6)
    expected = rotated(inner, angle.cos().double(), angle.sin().double())
    assert relative_error(y, expected) < ROUNDING[dtype]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("width", [77, 80])
def test_gates(device, dtype, silu, width):
    gate, x = (random_input(3, 5, width, seed=seed, device=device).to(dtype) for seed in (1, 2))
    factor = torch.sigmoid(gate.double()) * (gate.double() if silu else 1)
    y = ops.gate_mul(gate, x, silu=silu)
    assert y.dtype == dtype
    assert relative_error(y, x.double() * factor) < ROUNDING[dtype]


def delta_arguments(
    device, batch=2, tokens=5, dtype=torch.float32, lengths=None, taps=4, dims=(16, 24)
):
    heads, value_heads, (key_dim, value_dim) = 2, 6, dims
    channels = 2 * heads * key_dim + value_heads * value_dim
    sizes = [
        (batch, tokens, channels),
        (batch, channels, taps - 1),
        (channels, 1, taps),
        (batch, tokens, value_heads),
        (batch, tokens, value_heads),
        (value_heads,),
        (value_heads,),
    ]
    tensors = [random_input(*size, seed=n, device=device) for n, size in enumerate(sizes)]
    for n in (0, 3, 4):
        tensors[n] = tensors[n].to(dtype)
    tensors[3][0, 0, 0] = 60  # softplus is linear there
    if lengths is not None:
        lengths = torch.tensor(lengths, device=device)
    return [*tensors, lengths, heads, key_dim]


def exact_delta_inputs(qkv, past, weight, a, b, decay_log, time_bias, lengths, heads, key_dim):
    batch, tokens, channels = qkv.shape
    values, taps = decay_log.shape[0], weight.shape[-1]
    padded = torch.cat([past.double(), qkv.double().transpose(1, 2)], -1)
    windows = padded.unfold(-1, taps, 1)
    mixed = torch.nn.functional.silu((windows * weight[:, 0].double()[:, None]).sum(-1))
    q, k, v = mixed.transpose(1, 2).split(
        [heads * key_dim] * 2 + [channels - 2 * heads * key_dim], 2
    )
    q, k = (t.unflatten(-1, (heads, key_dim)) for t in (q, k))
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    lengths = torch.full((batch,), tokens, device=qkv.device) if lengths is None else lengths
    real = (torch.arange(tokens, device=qkv.device) < lengths[:, None])[..., None]
    softplus = torch.log1p(torch.exp(a.double() + time_bias.double()))
    g = -decay_log.double().exp() * softplus * real
    following = torch.stack(
        [padded[r, :, n : n + taps - 1] for r, n in enumerate(lengths.tolist())]
    )
    beta = torch.sigmoid(b.double()) * real
    return q * key_dim**-0.5, k, v.unflatten(-1, (values, -1)), g, beta, following


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tokens": 1, "batch": 1},
        {"tokens": 2, "taps": 7},
        {"dtype": torch.float16},
        {"dtype": torch.bfloat16},
        {"lengths": [5, 2]},
        {"lengths": [0, 1]},
        {"dims": (128, 128), "tokens": 67, "lengths": [67, 34], "dtype": torch.float16},
        {"dims": (128, 128), "tokens": 1, "batch": 3},
        {"dims": (15, 24)},
        {"dims": (16, 132)},
    ],
)
def test_inputs_of_the_delta_rule(device, changes):
    arguments = delta_arguments(device, **changes)
    found = ops.delta_inputs(*arguments)
    for ours, exact in zip(found, exact_delta_inputs(*arguments), strict=True):
        assert ours.dtype == torch.float32
        assert ours.shape == exact.shape
        assert (ours.double() - exact).norm() <= 2e-6 * exact.norm()


def test_wrong_arguments_are_refused_with_their_name():
    x, scale = random_input(2, 8), random_input(8)
    angle = random_input(2, 3, 1, 5)
    with pytest.raises(
        FormatError, match=r"rms_norm: x has shape \(2, 8\), expected \(\.\.\., 7\)"
    ):
        ops.rms_norm(x, scale[:7], 1e-6)
    with pytest.raises(FormatError, match="gate has shape"):
        ops.rms_norm(x, scale, 1e-6, x[:1])
    with pytest.raises(FormatError, match="scale is float16, expected float32"):
        ops.rms_norm(x, scale.half(), 1e-6)
    with pytest.raises(FormatError, match="two lanes are needed"):
        ops.norm_rotate(random_input(2, 3, 4, 8), None, 0.0, angle, angle)
    with pytest.raises(FormatError, match="gate_mul: gate has shape"):
        ops.gate_mul(x[:1], x, silu=True)
    arguments = delta_arguments("cpu")
    with pytest.raises(FormatError, match="delta_inputs: past has shape"):
        ops.delta_inputs(arguments[0], arguments[1][:1], *arguments[2:])
    with pytest.raises(FormatError, match="are not q, k and v"):
        ops.delta_inputs(*arguments[:-1], 400)
