"""Scale refit to a finished trellis."""

from __future__ import annotations

import torch
from quant_material import correlated_rows, grid_quantizer, uneven_weight

from exllamav3.quant import chunks
from exllamav3.quant.metrics import decoded_columns, weight_errors
from exllamav3.quant.refit import refit_scales

EVERYTHING = slice(0, None)


def problem(seed=0, k=256, n=256):
    generator = torch.Generator().manual_seed(seed)
    inner = grid_quantizer(torch.randn(k, n, generator=generator), 4, None)[0]
    su = uneven_weight(k, 1, seed).flatten()
    sv = uneven_weight(n, 1, seed + 1).flatten() * 50
    x = correlated_rows(2 * k, k, seed)
    metric = x.T @ x / len(x) + 0.02 * torch.eye(k)
    clean = decoded_columns(inner, su, sv, EVERYTHING)
    noise = 0.1 * clean.std() * torch.randn(k, n, generator=generator)
    return clean + noise, inner, su, sv, metric


def error(weight, inner, su, sv, metric):
    return weight_errors(weight, inner, su, sv, metric)[0]


def test_wrong_scales_are_repaired():
    weight, inner, su, sv, metric = problem()
    generator = torch.Generator().manual_seed(9)
    bad_su = su * (1 + 0.1 * torch.randn(su.shape, generator=generator))
    bad_sv = sv * (1 + 0.1 * torch.randn(sv.shape, generator=generator))
    true = error(weight, inner, su, sv, metric)
    before = error(weight, inner, bad_su, bad_sv, metric)
    after = error(weight, inner, *refit_scales(weight, inner, bad_su, bad_sv, metric), metric)
    assert before > 1.5 * true
    assert after < true  # better than the scales the noise was added to


def test_the_error_never_grows():
    for seed in range(5):
        weight, inner, su, sv, metric = problem(seed, k=128, n=128)
        before = error(weight, inner, su, sv, metric)
        assert error(weight, inner, *refit_scales(weight, inner, su, sv, metric), metric) <= before


def test_a_perfect_weight_keeps_its_scales():
    _, inner, su, sv, metric = problem(seed=3)
    weight = decoded_columns(inner, su, sv, EVERYTHING)
    new_su, new_sv = refit_scales(weight, inner, su, sv, metric)
    rebuilt = decoded_columns(inner, new_su, new_sv, EVERYTHING)
    torch.testing.assert_close(rebuilt, weight, rtol=1e-3, atol=1e-6)


def test_zero_scales_stay_zero():
    weight, inner, su, sv, metric = problem(seed=4)
    su[5], sv[7:20] = 0.0, 0.0
    new_su, new_sv = refit_scales(weight, inner, su, sv, metric)
    assert new_su[5] == 0
    assert not new_sv[7:20].any()
    assert new_su.isfinite().all()
    assert new_sv.isfinite().all()


def test_an_opposed_trellis_is_not_made_worse():
    weight, inner, su, sv, metric = problem(seed=5)
    before = error(-weight, inner, su, sv, metric)
    new_su, new_sv = refit_scales(-weight, inner, su, sv, metric)
    assert error(-weight, inner, new_su, new_sv, metric) <= before
    assert torch.equal(new_su.sign(), su.sign())
    assert torch.equal(new_sv.sign(), sv.sign())


def test_cutting_into_column_ranges_changes_nothing_but_rounding(monkeypatch):
    weight, inner, su, sv, metric = problem(seed=6)
    whole = refit_scales(weight, inner, su, sv, metric)
    monkeypatch.setattr(chunks, "CHUNK_WEIGHTS", 256 * 128)
    cut = refit_scales(weight, inner, su, sv, metric)
    for a, b in zip(whole, cut, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=0)
