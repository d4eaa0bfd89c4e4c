"""The trained example on the evaluation text."""

import pytest
import torch
import torch.nn.functional as F
from tiny_models import load_model
from tokenizers import Tokenizer

ROWS, COLUMNS = 32, 512


def test_perplexity_of_the_trained_example_is_14_24(example_model):
    text = (example_model.parent / "text" / "evaluation.txt").read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(example_model / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids[: ROWS * COLUMNS]
    rows = torch.tensor(ids).view(ROWS, COLUMNS)
    model = load_model(example_model)
    loss = torch.zeros((), dtype=torch.float64)
    for part in rows.split(8):  # rows a pass, for memory
        logits = model.forward(part)[:, :-1]
        loss += F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
    perplexity = float((loss / (ROWS * (COLUMNS - 1))).exp())
    assert perplexity == pytest.approx(14.24, abs=0.005)
