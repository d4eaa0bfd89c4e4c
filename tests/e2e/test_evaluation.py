from pathlib import Path

import pytest

from exllamav3 import Config, Model, Tokenizer
from exllamav3.evaluation import evaluate, token_rows

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def trained():
    config = Config.from_directory(ROOT / "examples/tiny-qwen35-lm")
    model = Model.from_config(config)
    model.load(device="cpu")
    text = (ROOT / "examples/text/evaluation.txt").read_text(encoding="utf-8")
    return model, token_rows(Tokenizer.from_config(config), text, 32, 512)


def test_the_trained_model_has_its_published_perplexity(trained):
    # 14.24 is that of a float32 run of `transformers` over the same 32 x 512 tokens.
    assert evaluate(*trained).perplexity == pytest.approx(14.24, abs=0.005)


def test_the_trained_model_does_not_diverge_from_itself(trained):
    model, ids = trained
    result = evaluate(model, ids[:2], model)
    assert (result.kl, result.top1_agreement) == (0.0, 1.0)
