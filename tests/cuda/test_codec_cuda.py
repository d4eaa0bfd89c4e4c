"""pack, unpack, decode, reconstruct, Hadamard and deinterleave on a GPU against the references."""

import pytest
import torch
from test_linear_cuda import RATES, random_input, random_weight

from exllamav3 import ops
from exllamav3.errors import FormatError
from exllamav3.ops.reference import codec as reference
from exllamav3.ops.reference import matrix_product as product_reference
from exllamav3.ops.reference.deinterleave import deinterleave_qg as deinterleave_reference
from exllamav3.ops.reference.hadamard import hadamard as hadamard_reference

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize(("bits", "codebook"), RATES)
def test_states_bits_and_values_are_those_of_the_reference(bits, codebook):
    trellis = random_weight(80, 208, bits)[0]  # tiles, but no whole blocks of 128
    states = reference.unpack(trellis.cpu())
    assert torch.equal(ops.unpack(trellis).cpu(), states)
    assert torch.equal(ops.pack(states.cuda(), bits).cpu(), trellis.cpu())
    expected = reference.decode(trellis.cpu(), codebook.id)
    found = ops.decode(trellis, codebook).cpu()
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize(("bits", "codebook"), RATES)
def test_reconstruction_is_exact_up_to_float32_rounding(bits, codebook):
    trellis, suh, svh, _ = random_weight(384, 256, bits)
    expected = reference.reconstruct(
        trellis.cpu(), suh.cpu(), svh.cpu(), codebook.id, torch.float32
    )
    found = ops.reconstruct(trellis, suh, svh, codebook).cpu()
    assert (found - expected).norm() / expected.norm() < 1e-6
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(
            ops.reconstruct(trellis, suh, svh, codebook, dtype).cpu(), found.to(dtype)
        )


def relative(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("bits", "codebook"), RATES)
@pytest.mark.parametrize(("k", "n"), [(128, 128), (640, 384)])
def test_factors_of_a_product_are_those_of_the_reference(bits, codebook, k, n):
    trellis, suh, svh, _ = random_weight(k, n, bits)
    expected = product_reference.reconstruct_columns(
        trellis.cpu(), suh.cpu(), svh.cpu(), codebook.id
    )
    found = torch.ops.exllamav3.reconstruct_columns(trellis, suh, svh, codebook.id).cpu()
    assert relative(found, expected) < 5e-5  # float32 sums in another order, then float16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 128), (3, 5, 640)])
@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e-2, 1.0, 1000.0])
def test_rotated_input_is_that_of_the_reference(dtype, shape, scale):
    x = random_input(shape[0], shape[-1], dtype)
    if len(shape) == 3:
        x = x[:, None].expand(shape)
    suh = (scale * random_input(1, shape[-1], torch.float32, seed=3)[0]).half()
    found = torch.ops.exllamav3.rotate_input(x, suh).cpu()
    expected = product_reference.rotate_input(x.cpu(), suh.cpu())
    assert found.shape == shape
    assert torch.equal(found, expected) or relative(found, expected) < 5e-5


def test_slices_of_columns_are_reconstructed_where_they_lie():
    trellis, suh, svh, _ = random_weight(256, 512, 3)
    columns = torch.ops.exllamav3.reconstruct_columns(trellis, suh, svh, 2)
    part = torch.ops.exllamav3.reconstruct_columns(trellis[:, 8:24], suh, svh[128:384], 2)
    assert torch.equal(part, columns[:, 128:384])
    whole = ops.reconstruct(trellis, suh, svh, 2)
    assert torch.equal(ops.reconstruct(trellis[:, 8:24], suh, svh[128:384], 2), whole[:, 128:384])
    assert torch.equal(ops.decode(trellis[:, 8:24], 2), ops.decode(trellis, 2)[:, 128:384])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_hadamard_of_any_dtype_and_scales(dtype):
    x = random_input(5, 384, dtype)
    pre, post = random_input(1, 384)[0], random_input(1, 384, torch.float32, seed=2)[0]
    for scales in ((None, None), (pre, None), (None, post), (pre, post)):
        on_cpu = [None if scale is None else scale.cpu() for scale in scales]
        found, expected = ops.hadamard(x, *scales).cpu(), hadamard_reference(x.cpu(), *on_cpu)
        # a different order of float32 sums may round the other way once
        step = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        torch.testing.assert_close(found, expected, rtol=step, atol=step)


@pytest.mark.parametrize(("heads", "head_dim"), [(24, 256), (3, 8), (1, 128)])
def test_query_and_gate_are_separated(heads, head_dim):
    qg = random_input(6, heads * 2 * head_dim).reshape(2, 3, -1)
    q, gate = ops.deinterleave_qg(qg, head_dim)
    expected_q, expected_gate = deinterleave_reference(qg.cpu(), head_dim)
    assert torch.equal(q.cpu(), expected_q)
    assert torch.equal(gate.cpu(), expected_gate)
    assert q.is_contiguous()
    assert gate.is_contiguous()


def test_the_deinterleave_kernel_refuses_what_it_cannot_read():
    qg = random_input(2, 64).reshape(1, 2, 64)
    with pytest.raises(RuntimeError, match="multiple of 8"):
        ops.deinterleave_qg(qg, 4)
    with pytest.raises(FormatError, match="contiguous"):
        ops.deinterleave_qg(random_input(64, 2).T.reshape(1, 2, 64).transpose(0, 1), 8)
    odd = torch.empty(1, 129, device="cuda", dtype=torch.float16)[:, 1:].reshape(1, 1, 128)
    with pytest.raises(RuntimeError, match="aligned"):
        torch.ops.exllamav3.deinterleave_qg(odd, 8)


CASES = {
    "pack": lambda w, x: (ops.unpack(w[0]), 4.0),
    "unpack": lambda w, x: (w[0],),
    "decode": lambda w, x: (w[0], 2),
    "reconstruct": lambda w, x: (*w[:3], 1, torch.float16),
    "hadamard": lambda w, x: (x, w[1], None),
    "linear": lambda w, x: (x, *w, 0, torch.float32),
    "linear_group": lambda w, x: (
        x, [w[0]] * 2, [w[1]] * 2, [w[2]] * 2, [0, 2], torch.float16
    ),
    "deinterleave_qg": lambda w, x: (x.reshape(1, 3, -1), 16),
}  # fmt: skip


@pytest.mark.parametrize("op", list(CASES))
def test_operator_passes_opcheck(op):
    arguments = CASES[op](random_weight(256, 128, 4), random_input(3, 256))
    torch.library.opcheck(getattr(torch.ops.exllamav3, op).default, arguments)


@pytest.mark.parametrize("op", list(CASES))
def test_operator_has_a_native_kernel(op):
    assert ops.backend(op, "cuda") == "native"
