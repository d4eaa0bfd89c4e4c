import math

import pytest
import torch

from exllamav3.errors import FormatError
from exllamav3.generator import (
    CategoricalSampler,
    ComboSampler,
    CustomSampler,
    DefaultSampler,
    GreedySampler,
    TopKSampler,
    TopPSampler,
)
from exllamav3.generator.sampling_steps import (
    MinP,
    PresenceFrequencyPenalty,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
)

NO_PAST = torch.tensor([], dtype=torch.long)


def random_logits(seed=0, vocab=50):
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3


def kept(logits):
    return {int(i) for i in (logits > -math.inf).nonzero()}


def draws(sampler, logits, count=2000, past=NO_PAST, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [sampler.sample(logits, past, generator) for _ in range(count)]


def test_greedy_takes_the_likeliest_token_and_no_random_number():
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    logits = random_logits()
    assert GreedySampler().sample(logits, NO_PAST, generator) == int(logits.argmax())
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("k", [1, 2, 7, 50, 51])
def test_top_k_keeps_exactly_the_k_largest(k):
    logits = random_logits()
    order = sorted(range(50), key=lambda i: -logits[i])
    assert kept(TopK(k).apply(logits, NO_PAST)) == set(order[:k])


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_smallest_set_that_reaches_p(p):
    logits = random_logits()
    probs = logits.double().softmax(0)
    expected, mass = set(), 0.0
    for index in sorted(range(50), key=lambda i: -probs[i]):
        expected.add(index)
        mass += float(probs[index])
        if mass >= p:
            break
    assert kept(TopP(p).apply(logits, NO_PAST)) == expected


@pytest.mark.parametrize("p", [0.01, 0.08, 0.5, 1.0])
def test_min_p_keeps_tokens_near_the_likeliest(p):
    logits = random_logits()
    probs = logits.softmax(0)
    assert kept(MinP(p).apply(logits, NO_PAST)) == {
        i for i in range(50) if probs[i] >= p * probs.max()
    }


def test_filters_leave_the_kept_logits_as_they_are():
    logits = random_logits()
    for step in (TopK(5), TopP(0.7), MinP(0.1)):
        filtered = step.apply(logits, NO_PAST)
        keep = filtered > -math.inf
        assert torch.equal(filtered[keep], logits[keep])


def test_repetition_penalty_weakens_tokens_of_both_signs_once():
    logits = torch.tensor([2.0, -2.0, 1.0, 3.0])
    past = torch.tensor([0, 1, 1, 0])
    out = RepetitionPenalty(2.0).apply(logits, past)
    assert out.tolist() == [1.0, -4.0, 1.0, 3.0]
    assert logits[0] == 2.0  # the input is untouched


def test_penalties_look_back_only_as_far_as_asked():
    logits = torch.zeros(4)
    past = torch.tensor([0, 1, 2, 2])
    out = PresenceFrequencyPenalty(1.0, 0.5, last_tokens=3).apply(logits, past)
    assert out.tolist() == [0.0, -1.5, -2.0, 0.0]
    assert PresenceFrequencyPenalty(1.0, 0.5, last_tokens=0).apply(logits, past) is logits


def test_temperature_divides_and_zero_leaves_the_likeliest():
    logits = random_logits()
    assert torch.equal(Temperature(0.5).apply(logits, NO_PAST), logits * 2)
    assert kept(Temperature(0).apply(logits, NO_PAST)) == {int(logits.argmax())}


@pytest.mark.parametrize(
    "step",
    [
        TopK(0),
        TopP(1.0),
        MinP(0.0),
        Temperature(1.0),
        RepetitionPenalty(1.0),
        PresenceFrequencyPenalty(),
    ],
)
def test_neutral_values_change_nothing(step):
    logits = random_logits()
    assert step.apply(logits, torch.tensor([1, 2])) is logits


def test_draws_follow_the_distribution():
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0]).log()
    counts = torch.tensor(draws(CategoricalSampler(), logits, 20000)).bincount(minlength=5)
    # Four standard deviations of a binomial share at p = 0.4, n = 20000.
    assert torch.allclose(counts / 20000, logits.exp(), atol=4 * math.sqrt(0.24 / 20000))
    assert counts[4] == 0


def test_the_same_seed_gives_the_same_draws_and_another_seed_others():
    logits = random_logits(vocab=500)
    sampler = CategoricalSampler(2.0)
    assert draws(sampler, logits, 50, seed=7) == draws(sampler, logits, 50, seed=7)
    assert draws(sampler, logits, 50, seed=7) != draws(sampler, logits, 50, seed=8)


def test_the_last_and_only_token_can_be_drawn():
    logits = torch.full((9,), -math.inf)
    logits[8] = -5.0
    assert set(draws(CategoricalSampler(), logits, 20)) == {8}


def test_combinations_apply_every_filter():
    logits = random_logits()
    sampler = ComboSampler(0.8, min_p=0.05, top_k=10, top_p=0.9)
    expected = TopP(0.9).apply(
        TopK(10).apply(MinP(0.05).apply(logits / 0.8, NO_PAST), NO_PAST), NO_PAST
    )
    assert set(draws(sampler, logits)) <= kept(expected)
    assert set(draws(TopKSampler(3), logits)) <= kept(TopK(3).apply(logits, NO_PAST))
    assert set(draws(TopPSampler(0.5), logits)) <= kept(TopP(0.5).apply(logits, NO_PAST))
    assert set(draws(DefaultSampler(), logits)) <= kept(MinP(0.08).apply(logits, NO_PAST))


def test_combination_at_temperature_zero_is_greedy_after_the_penalties():
    logits = torch.tensor([3.0, 2.9, 0.0])
    sampler = ComboSampler(temperature=0, rep_p=1.5)
    assert set(draws(sampler, logits, 5)) == {0}
    assert set(draws(sampler, logits, 5, past=torch.tensor([0]))) == {1}


def test_a_temperature_applied_last_does_not_widen_the_filters():
    logits = random_logits()
    sampler = ComboSampler(5.0, top_p=0.5, temperature_last=True)
    assert set(draws(sampler, logits)) == kept(TopP(0.5).apply(logits, NO_PAST))


def test_a_custom_stack_runs_in_the_given_order():
    logits = random_logits()
    sampler = CustomSampler([TopK(4), Temperature(100.0)])
    assert set(draws(sampler, logits)) == kept(TopK(4).apply(logits, NO_PAST))
    assert CustomSampler([TopK(4)], greedy=True).sample(logits, NO_PAST, torch.Generator()) == int(
        logits.argmax()
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopP(1.5), r"TopP: p is 1\.5"),
        (lambda: TopK(-1), "TopK: k is -1"),
        (lambda: MinP(-0.1), "MinP"),
        (lambda: Temperature(-1), "Temperature"),
        (lambda: Temperature(math.nan), "Temperature"),
        (lambda: Temperature(math.inf), "Temperature"),
        (lambda: RepetitionPenalty(0), "RepetitionPenalty"),
        (lambda: RepetitionPenalty(math.inf), "RepetitionPenalty"),
        (lambda: PresenceFrequencyPenalty(math.nan), "PresenceFrequencyPenalty: presence is nan"),
        (lambda: PresenceFrequencyPenalty(0.0, -math.inf), "frequency is -inf"),
        (lambda: ComboSampler(freq_p=math.nan), "frequency is nan"),
    ],
)
def test_parameters_outside_their_domain_are_refused(make, message):
    with pytest.raises(FormatError, match=message):
        make()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_numbers_are_refused(bad):
    logits = random_logits()
    logits[3] = bad
    with pytest.raises(FormatError, match="NaN or infinity"):
        GreedySampler().sample(logits, NO_PAST, torch.Generator())
