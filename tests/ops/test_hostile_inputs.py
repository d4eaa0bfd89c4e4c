"""Wrong arguments give a readable FormatError before any kernel runs, and never a crash."""

import pytest
import torch
from samples import native_only, random_delta_inputs, random_input, random_weight

from exllamav3 import ops
from exllamav3.codec.params import Codebook
from exllamav3.errors import FormatError

W = random_weight()
X = random_input(2, 256)
BOOK = Codebook.MUL1


def trellis(*shape, dtype=torch.int16):
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (trellis(8, 8, 64, dtype=torch.int32), "trellis is int32, expected int16"),
        (trellis(8, 64), r"trellis has shape \(8, 64\), expected 3 dimensions"),
        (trellis(8, 8, 0), "last dimension of trellis is 0, expected 16.K"),
        (trellis(8, 8, 60), "last dimension of trellis is 60, expected 16.K"),
        (trellis(8, 8, 72), "last dimension of trellis is 72, expected 16.K"),
        (trellis(8, 8, 144), "last dimension of trellis is 144, expected 16.K"),
        ([1, 2], "trellis is a list, expected a tensor"),
    ],
)
@pytest.mark.parametrize("op", ["unpack", "decode", "reconstruct", "exl3_linear"])
def test_a_bad_trellis_is_named(op, bad, message):
    calls = {
        "unpack": lambda: ops.unpack(bad),
        "decode": lambda: ops.decode(bad, BOOK),
        "reconstruct": lambda: ops.reconstruct(bad, W.suh, W.svh, BOOK),
        "exl3_linear": lambda: ops.exl3_linear(X, bad, W.suh, W.svh, None, BOOK),
    }
    with pytest.raises(FormatError, match=f"{op}: {message}"):
        calls[op]()


@pytest.mark.parametrize("codebook", [Codebook.INST3, Codebook.MCG, 0, 1])
def test_a_half_rate_needs_mul1(codebook):
    with pytest.raises(FormatError, match=r"rate K = 2\.5 goes with codebook mul1"):
        ops.decode(random_weight(bits=2.5).trellis, codebook)


@pytest.mark.parametrize("codebook", [3, -1, "mul1", None])
def test_an_unknown_codebook_is_refused(codebook):
    with pytest.raises(FormatError, match=r"codebook .* is unknown"):
        ops.decode(W.trellis, codebook)


@pytest.mark.parametrize(
    ("states", "bits", "message"),
    [
        (torch.zeros(2, 255, dtype=torch.int16), 4, r"shape \(2, 255\), expected \(..., 256\)"),
        (torch.zeros(256, dtype=torch.int32), 4, "states is int32, expected int16"),
        (torch.zeros((), dtype=torch.int16), 4, "expected"),
        (torch.zeros(256, dtype=torch.int16), 0, "bits is 0, expected 1..8"),
        (torch.zeros(256, dtype=torch.int16), 4.5, "bits is 4.5, expected 1..8"),
        (torch.zeros(256, dtype=torch.int16), 9, "bits is 9, expected 1..8"),
    ],
)
def test_bad_states_are_not_packed(states, bits, message):
    with pytest.raises(FormatError, match=message):
        ops.pack(states, bits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"suh": W.suh.float()}, "suh is float32, expected float16"),
        ({"suh": W.suh[:-1]}, r"suh has shape \(255,\), expected \(256,\)"),
        ({"svh": W.svh[None]}, "svh has shape .* expected 1 dimensions"),
        ({"svh": W.suh}, r"svh has shape \(256,\), expected \(128,\)"),
        ({"bias": W.bias[:5]}, r"bias has shape \(5,\), expected \(128,\)"),
        ({"bias": W.bias.int()}, "bias is int32, expected float32 or float16 or bfloat16"),
        ({"trellis": W.trellis[:9]}, "k is 144, expected a positive multiple of 128"),
        ({"trellis": W.trellis[:, :7]}, "n is 112, expected a positive multiple of 128"),
        ({"trellis": W.trellis[:0]}, "k is 0, expected a positive multiple of 128"),
    ],
)
def test_bad_scales_and_sizes_are_named(change, message):
    weight = W._replace(**change)
    with pytest.raises(FormatError, match=f"exl3_linear: {message}"):
        ops.exl3_linear(X, *weight, BOOK)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (X.double(), "x is float64, expected float32 or float16 or bfloat16"),
        (X[:, :255], r"x has shape \(2, 255\), expected \(..., 256\)"),
        (torch.zeros(()), r"x has shape \(\), expected \(..., 256\)"),
    ],
)
def test_a_bad_input_is_named(x, message):
    with pytest.raises(FormatError, match=message):
        ops.exl3_linear(x, *W, BOOK)
    with pytest.raises(FormatError, match=message):
        ops.exl3_linear_group(x, [W.trellis], [W.suh], [W.svh], [BOOK])


def test_a_bad_output_dtype_is_named():
    with pytest.raises(FormatError, match=r"output dtype is torch\.int8"):
        ops.exl3_linear(X, *W, BOOK, torch.int8)


@pytest.mark.parametrize("count", [(0, 0, 0, 0), (2, 1, 1, 1), (1, 1, 1, 2)])
def test_a_group_needs_equally_many_of_everything(count):
    lists = [[value] * n for value, n in zip((*W[:3], BOOK), count, strict=True)]
    with pytest.raises(FormatError, match="expected the same number of each, at least one"):
        ops.exl3_linear_group(X, *lists)


@pytest.mark.parametrize(
    ("x", "pre", "message"),
    [
        (torch.zeros(3, 64), None, "last dimension of x is 64, expected a positive multiple"),
        (torch.zeros(3, 0), None, "last dimension of x is 0"),
        (torch.zeros(()), None, "x is a scalar"),
        (torch.zeros(3, 128, dtype=torch.int16), None, "x is int16"),
        (torch.zeros(3, 128), torch.zeros(64), r"pre_scale has shape \(64,\), expected \(128,\)"),
    ],
)
def test_hadamard_refuses_what_is_not_made_of_blocks(x, pre, message):
    with pytest.raises(FormatError, match=message):
        ops.hadamard(x, pre)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("k", lambda t: t[:, :, :, :5], "k has shape"),
        ("v", lambda t: t[:, :, :3], "expected"),
        ("v", lambda t: t.half(), "v is float16, expected float32"),
        ("g", lambda t: t.half(), "g is float16, expected float32"),
        ("beta", lambda t: t[:, :1], "beta has shape"),
        ("state", lambda t: t[:1], "state has shape"),
        ("state", lambda t: t.transpose(2, 3), "state has shape"),
    ],
)
def test_the_delta_rule_names_the_argument_that_does_not_fit(name, change, message):
    inputs = random_delta_inputs()
    inputs = inputs._replace(**{name: change(getattr(inputs, name))})
    with pytest.raises(FormatError, match=f"gated_delta_rule: .*{message}"):
        ops.gated_delta_rule(*inputs)


def test_v_heads_must_be_a_multiple_of_k_heads():
    with pytest.raises(FormatError, match="v has 3 heads, expected a multiple of the 2 heads"):
        ops.gated_delta_rule(*random_delta_inputs(v_heads=3))


@native_only
@pytest.mark.parametrize(
    "call",
    [
        lambda op: op.unpack(trellis(8, 8, 60)),
        lambda op: op.decode(trellis(8, 8, 24), 0),
        lambda op: op.decode(W.trellis, 7),
        lambda op: op.pack(torch.zeros(256, dtype=torch.int16), 4.3),
        lambda op: op.reconstruct(W.trellis[:9], W.suh[:144], W.svh, 2, torch.float32),
        lambda op: op.linear(X, W.trellis, W.suh[:9], W.svh, None, 2, torch.float32),
        lambda op: op.linear(X[:, :5], *W, 2, torch.float32),
        lambda op: op.hadamard(torch.zeros(3, 100), None, None),
        lambda op: op.deinterleave_qg(torch.zeros(1, 1, 10).half(), 3),
        lambda op: op.gated_delta_rule(*random_delta_inputs(v_heads=3)),
        lambda op: op.gated_delta_rule(*random_delta_inputs()[:5], torch.zeros(1, 1, 1, 1)),
    ],
)
def test_kernels_guard_memory_even_when_the_wrappers_are_bypassed(call):
    with pytest.raises(RuntimeError):
        call(torch.ops.exllamav3)
