"""The codebooks as sets of values."""

import pytest

from exllamav3.codec.params import Codebook
from exllamav3.ops.reference.codebook import codebook_values


@pytest.mark.parametrize(
    ("codebook", "mean", "std", "low", "high", "distinct", "first"),
    [
        ("3inst", 0.000210, 1.243711, -3.9570, 3.9727, 10598, (0.76806641, -0.91943359)),
        ("mcg", -0.000037, 1.244112, -3.9492, 3.9492, 10746, (1.84375, 0.13452148)),
        ("mul1", -0.001931, 1.000310, -3.4531, 3.3477, 913, (-3.453125, 0.64111328)),
    ],
)
def test_values_have_the_known_distribution(codebook, mean, std, low, high, distinct, first):
    values = codebook_values(Codebook.from_name(codebook).id).double()
    assert values.mean().item() == pytest.approx(mean, abs=1e-6)
    assert values.std(correction=0).item() == pytest.approx(std, abs=1e-6)
    assert values.min().item() == pytest.approx(low, abs=1e-4)
    assert values.max().item() == pytest.approx(high, abs=1e-4)
    assert len(values.unique()) == distinct
    assert values[:2].tolist() == pytest.approx(first, abs=1e-8)


@pytest.mark.parametrize("codebook", list(Codebook))
def test_no_value_is_a_float16_subnormal(codebook):
    """The vectorized rounding to float16 relies on it."""
    magnitudes = codebook_values(codebook.id).double().abs()
    assert magnitudes[magnitudes > 0].min() >= 2**-14
