import pytest
import torch
from tiny_models import exact_weight, random_exl3, relative_error

from exllamav3.codec.tensor import Exl3Tensor
from exllamav3.errors import FormatError, UnsupportedError
from exllamav3.modules.context import ForwardContext
from exllamav3.modules.linear import Linear
from exllamav3.modules.module import DictSource

CTX = ForwardContext.uncached(1, 1)


def loaded(linear, tensors, dtype=torch.float32):
    linear.load(DictSource(tensors), "cpu", dtype)
    return linear


@pytest.mark.parametrize(
    ("in_features", "out_features"),
    [(576, 576), (576, 192), (256, 64), (100, 300), (128, 151665)],
)
def test_widths_that_are_no_multiple_of_128_are_padded_and_trimmed(in_features, out_features):
    linear = Linear("a", in_features, out_features, bias=True)
    tensors = random_exl3("a", in_features, out_features, bias=True)
    loaded(linear, tensors)
    x = torch.randn(2, 3, in_features)
    weight = exact_weight(linear.weight)[:in_features, :out_features]
    expected = x.double() @ weight + tensors["a.bias"][:out_features].double()
    y = linear.forward(x, CTX)
    assert y.shape == (2, 3, out_features)
    assert relative_error(y, expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_output_dtype_is_the_activation_dtype_unless_stated(dtype, out_dtype):
    tensors = {"a.weight": torch.randn(32, 64).bfloat16(), "a.bias": torch.randn(32).bfloat16()}
    linear = loaded(Linear("a", 64, 32, bias=True, out_dtype=out_dtype), tensors, dtype)
    x = torch.randn(5, 64)
    y = linear.forward(x.to(dtype), CTX)
    assert y.dtype == (out_dtype or dtype)
    expected = x.double() @ tensors["a.weight"].double().t() + tensors["a.bias"].double()
    assert relative_error(y, expected) < (1e-6 if dtype == torch.float32 else 2e-3)


class Capture:
    def __init__(self):
        self.seen = []

    def observe(self, qmap, key, x):
        self.seen.append((qmap, key, x.shape))


def test_capture_sees_the_unpadded_input_of_linears_with_a_qmap():
    capture = Capture()
    ctx = ForwardContext(positions=torch.zeros(1, 1), capture=capture)
    quantized = loaded(Linear("a", 100, 10, qmap="block.x"), random_exl3("a", 100, 10))
    plain = loaded(Linear("b", 100, 10), {"b.weight": torch.randn(10, 100)})
    for linear in (quantized, plain):
        linear.forward(torch.randn(3, 100), ctx)
    assert capture.seen == [("block.x", "a", (3, 100))]


def test_an_exl3_weight_is_given_back_as_it_was_stored():
    tensors = random_exl3("a", 128, 256, bits=3, codebook="mcg", bias=True)
    linear = loaded(Linear("a", 128, 256, bias=True), tensors)
    found = linear.get_tensors()
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_a_dense_weight_is_given_back_in_float16():
    tensors = {"a.weight": torch.randn(3, 5).bfloat16()}
    found = loaded(Linear("a", 5, 3), tensors).get_tensors()
    assert torch.equal(found["a.weight"], tensors["a.weight"].half())


def test_rate_and_codebook_come_from_the_tensors():
    linear = loaded(Linear("a", 128, 128), random_exl3("a", 128, 128, bits=2.5))
    assert isinstance(linear.weight, Exl3Tensor)
    assert linear.weight.bits == 2.5
    assert linear.weight.codebook.value == "mul1"


def test_unloading_drops_the_weight():
    linear = loaded(Linear("a", 128, 128), random_exl3("a", 128, 128))
    assert isinstance(linear.weight, Exl3Tensor)
    linear.unload()
    assert linear.weight is None
    assert linear.device is None


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "neither a.weight nor a.trellis"),
        ({"a.weight": torch.zeros(3, 4)}, r"shape \[3, 4\], the configuration asks for \[3, 5\]"),
        ({"a.weight": torch.zeros(3, 5), "a.bias": torch.zeros(3)}, "a.bias: present"),
        (random_exl3("a", 256, 3), "holds a 256 x 128 matrix"),
        ({"a.weight": torch.zeros(3, 5)} | random_exl3("a", 5, 3), "both a.weight and a.trellis"),
        (
            {k: v for k, v in random_exl3("a", 5, 3).items() if k != "a.suh"},
            "neither a.weight nor a.trellis with its scales",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tensors, message):
    with pytest.raises(FormatError, match=message):
        loaded(Linear("a", 5, 3), tensors)


def test_a_missing_bias_is_refused():
    with pytest.raises(FormatError, match=r"a\.bias: missing"):
        loaded(Linear("a", 5, 3, bias=True), {"a.weight": torch.zeros(3, 5)})


def test_a_dtype_that_cannot_be_computed_with_is_refused():
    with pytest.raises(UnsupportedError, match="stored as F8_E4M3"):
        loaded(Linear("a", 5, 3), {"a.weight": torch.zeros(3, 5).to(torch.float8_e4m3fn)})


class TestTiedHead:
    """A head with an alternative key, as tied embeddings make it."""

    def head(self, tensors):
        return loaded(Linear("lm_head", 8, 6, alt_key="embed"), tensors)

    def test_it_takes_the_embedding_where_there_is_no_head_tensor(self):
        table = torch.randn(6, 8)
        assert torch.equal(self.head({"embed.weight": table}).weight, table)

    def test_an_equal_head_tensor_is_no_contradiction(self):
        table = torch.randn(6, 8)
        head = self.head({"embed.weight": table, "lm_head.weight": table.clone()})
        assert torch.equal(head.weight, table)

    def test_a_head_in_float16_equals_its_embedding_in_bf16(self):
        table = torch.randn(6, 8).bfloat16()
        head = self.head({"embed.weight": table, "lm_head.weight": table.half()})
        assert torch.equal(head.weight, table.float())

    def test_another_head_tensor_is_a_contradiction(self):
        with pytest.raises(FormatError, match="tie_word_embeddings"):
            self.head({"embed.weight": torch.ones(6, 8), "lm_head.weight": torch.zeros(6, 8)})

    def test_a_quantized_head_is_its_own(self):
        tensors = {"embed.weight": torch.ones(6, 8)} | random_exl3("lm_head", 8, 6)
        assert isinstance(self.head(tensors).weight, Exl3Tensor)
