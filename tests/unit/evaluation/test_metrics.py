import math

import pytest
import torch
from fake_model import FakeModel, byte_tokenizer

from exllamav3.errors import FormatError
from exllamav3.evaluation import compare_row, evaluate, score_row, token_rows
from exllamav3.evaluation.metrics import CHUNK_TOKENS

LONG = CHUNK_TOKENS + 37  # crosses the edge of a chunk


def random_row(tokens=LONG, vocab=20, seed=0):
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, vocab, generator=random) * 3
    return logits, torch.randint(0, vocab, (tokens,), generator=random)


@pytest.mark.parametrize("tokens", [2, CHUNK_TOKENS, CHUNK_TOKENS + 1, LONG])
def test_negative_log_likelihood_equals_the_textbook_sum(tokens):
    logits, ids = random_row(tokens)
    expected = torch.nn.functional.cross_entropy(logits[:-1].double(), ids[1:], reduction="sum")
    row = score_row(logits, ids)
    assert row.nll == pytest.approx(float(expected), rel=1e-6)
    assert (row.predicted, row.positions) == (tokens - 1, tokens)


def test_divergence_equals_the_textbook_sum_and_points_from_the_reference():
    (result, ids), (reference, _) = random_row(), random_row(seed=1)
    p, q = reference.double().softmax(-1), result.double().softmax(-1)
    expected = float((p * (p / q).log()).sum())
    row = compare_row(result, reference, ids)
    assert row.kl == pytest.approx(expected, rel=1e-5)
    assert row.agreeing == int((p.argmax(-1) == q.argmax(-1)).sum())
    swapped = float((q * (q / p).log()).sum())
    assert compare_row(reference, result, ids).kl == pytest.approx(swapped, rel=1e-5)
    assert swapped != pytest.approx(expected, rel=1e-3)


def test_a_constant_added_to_the_logits_changes_nothing():
    logits, ids = random_row()
    row = compare_row(logits + 7.0, logits, ids)
    assert row.kl == pytest.approx(0, abs=1e-3)
    assert row.agreeing == LONG


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda x, i: (x[:-1], i), "expected \\(tokens, vocab\\)"),
        (lambda x, i: (x, i + 20), "beyond the 20 logits"),
        (lambda x, i: (x / 0, i), "NaN or infinity"),
    ],
)
def test_rows_that_make_no_sense_are_refused(break_it, message):
    with pytest.raises(FormatError, match=message):
        score_row(*break_it(*random_row()))


def test_models_with_other_vocabularies_are_not_compared():
    logits, ids = random_row()
    with pytest.raises(FormatError, match="vocabularies of 20 and 19"):
        compare_row(logits, logits[:, :19], ids.clamp(max=18))


def test_a_uniform_model_has_a_perplexity_of_its_vocabulary():
    class Uniform:
        def forward(self, ids, params):
            return torch.zeros(*ids.shape, 50)

    ids = torch.randint(0, 50, (3, 10), generator=torch.Generator().manual_seed(0))
    assert evaluate(Uniform(), ids).perplexity == pytest.approx(50)


def test_a_model_has_no_distance_from_itself_and_some_from_another():
    ids = torch.randint(0, 258, (2, 30), generator=torch.Generator().manual_seed(0))
    model, done = FakeModel(), []
    same = evaluate(model, ids, model, progress=done.append)
    assert (same.kl, same.top1_agreement) == (0.0, 1.0)
    assert same.perplexity == same.reference_perplexity
    assert done == [1, 2]
    other = evaluate(model, ids, FakeModel(seed=1))
    assert other.kl > 0.01
    assert other.top1_agreement < 1
    assert evaluate(model, ids).kl is None


def test_perplexity_weighs_every_predicted_token_alike():
    ids = torch.randint(0, 258, (2, 30), generator=torch.Generator().manual_seed(0))
    model = FakeModel()
    total = sum(score_row(model.forward(row[None], {})[0], row).nll for row in ids)
    assert evaluate(model, ids).perplexity == pytest.approx(math.exp(total / 58))


def test_rows_are_cut_one_after_the_other():
    tokenizer = byte_tokenizer()
    rows = token_rows(tokenizer, "abcdefghij", 2, 4)
    assert [tokenizer.decode(row) for row in rows] == ["abcd", "efgh"]
    tokenizer.bos_token_id = 1
    rows = token_rows(tokenizer, "abcdefghij", 3, 4, add_bos=True)
    assert [tokenizer.decode(row) for row in rows] == ["abc", "def", "ghi"]
    assert rows[:, 0].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 4), "the text has 10 tokens; 2 such rows fit"),
        ((0, 4), "0 rows of 4 tokens"),
        ((1, 1), "1 rows of 1 tokens"),
        ((1, 4, True), "no BOS token"),
    ],
)
def test_rows_that_cannot_be_cut_are_refused(arguments, message):
    with pytest.raises(FormatError, match=message):
        token_rows(byte_tokenizer(), "abcdefghij", *arguments)
