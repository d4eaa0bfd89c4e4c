"""Whole models on a GPU: conversion, fidelity by route, a fused block in cached passes."""

import json
from pathlib import Path

import pytest
import torch
from exllamav3.conversion import ConversionOptions, convert
from tiny_models import load_model

from exllamav3 import Cache, Tokenizer
from exllamav3.evaluation import evaluate, token_rows
from exllamav3.generator.decode_graphs import DecodeGraphs

pytestmark = pytest.mark.cuda

EXAMPLES = Path(__file__).parents[2] / "examples"
FUSED = {
    "schema": "exl3_qkv_topology/1",
    "layers": [
        {
            "layer": f"model.layers.{n}.self_attn",
            "variant": "fused_uniform",
            "K": 4,
            "codebook": "mul1",
            "scale": "always",
        }
        for n in (1, 3)
    ],
}
PLANS = {
    "split": None,
    "demo": json.loads((EXAMPLES / "tiny-plan.json").read_text()),
    "fused": FUSED,
}
KL_LIMIT = {"split": 0.030, "demo": 0.032, "fused": 0.032}
ROUTES = {
    "split": {"grouped"},
    "demo": {"fused", "grouped"},
    "fused": {"fused"},
}


@pytest.fixture(scope="module")
def rows(example_model):
    text = (EXAMPLES / "text" / "evaluation.txt").read_text()
    return token_rows(Tokenizer.from_directory(example_model), text, 8, 512)


@pytest.fixture(scope="module")
def source(example_model):
    return load_model(example_model, "cuda")


@pytest.fixture(scope="module", params=PLANS)
def converted(request, example_model, tmp_path_factory):
    """The example, converted on the GPU and loaded there."""
    root = tmp_path_factory.mktemp(request.param)
    plan = None
    if PLANS[request.param] is not None:
        plan = root / "plan.json"
        plan.write_text(json.dumps(PLANS[request.param]))
    options = ConversionOptions(
        in_dir=str(example_model),
        work_dir=str(root / "work"),
        out_dir=str(root / "out"),
        bits=4.0,
        head_bits=6,
        cal_rows=64,
        cal_cols=512,
        devices=("cuda:0",),
    )
    convert(options, None if plan is None else str(plan))
    return request.param, load_model(root / "out", "cuda")


def test_a_model_converted_on_the_gpu_stays_close_to_its_source(converted, source, rows):
    name, model = converted
    result = evaluate(model, rows, source)
    print(f"\n{name}: KL {result.kl:.5f}, perplexity {result.perplexity:.3f}")
    assert result.kl < KL_LIMIT[name]


def decoded_logits(model, ids, capture):
    """Logits of every place of one row, its second half decoded token by token."""
    cache = Cache(model, 512)
    sequence = cache.new_sequence(512)
    half = len(ids) // 2
    head = model.forward(ids[None, :half], {"cache": cache, "sequences": [sequence]})[0]
    sequence.length = half
    graphs = DecodeGraphs(model, cache, "cuda", capture)
    tail = []
    for token in ids[half:]:
        tail.append(graphs.step([sequence], token.view(1, 1)).clone())
        sequence.length += 1
    return torch.cat([head, *tail])


def kl(reference, logits):
    log_p, log_q = reference.log_softmax(-1), logits.log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


def test_decoding_from_a_graph_is_as_close_to_the_source_as_whole_rows(converted, source, rows):
    name, model = converted
    before = {layer: set(routes) for layer, routes in model.routes().items()}
    ids = rows[0, :256]
    whole = model.forward(ids[None])[0]
    graph, eager = decoded_logits(model, ids, True), decoded_logits(model, ids, False)
    assert torch.equal(graph, eager)
    exact = source.forward(ids[None])[0]
    print(
        f"\n{name}: KL to source {kl(exact, whole):.5f} whole, {kl(exact, graph):.5f} from a graph"
    )
    assert kl(exact, graph) < KL_LIMIT[name] * 1.5  # 256 places instead of 4096
    assert kl(whole, graph) < 1e-4
    taken = set().union(*(set(r) for r in model.routes().values()), *before.values())
    assert ROUTES[name] <= taken
