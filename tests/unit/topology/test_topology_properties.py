"""Properties over generated plans and arbitrary JSON."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from topology_samples import L3, L7, PLAN, inventory_of, sample_topology, text

from exllamav3.errors import TopologyError
from exllamav3.topology import (
    COMPONENTS,
    SCHEMA,
    AttentionFacts,
    ModelFacts,
    check_copies,
    check_tensor_storage,
    declaration_in_config,
    parse_declaration,
    parse_declaration_text,
    parse_plan,
    resolve_plan,
    validate_declaration,
)

FEW = settings(max_examples=60, deadline=None)
MANY = settings(max_examples=200, deadline=None)

layer_names = st.one_of(
    st.integers(0, 200).map(lambda n: f"model.layers.{n}.self_attn"),
    # One attention module is never inside another, so names of text have no dot.
    st.text(st.characters(exclude_characters="."), min_size=1, max_size=12),
)
bits = st.integers(3, 8)
codebooks = st.sampled_from(["mcg", "mul1"])
scales = st.sampled_from(["always", "never", "auto"])
domains = {"K": bits, "codebook": codebooks, "scale": scales}


@st.composite
def plan_rows(draw, layer: str) -> dict[str, Any]:
    kind = draw(st.sampled_from(["fused", "split", "projections"]))
    if kind == "fused":
        chosen = {key: draw(domain) for key, domain in domains.items()}
        return {"layer": layer, "variant": "fused_uniform", **chosen}
    row: dict[str, Any] = {"layer": layer, "variant": "split"}
    if kind == "projections":
        row["projections"] = [
            {"name": name, **draw(st.fixed_dictionaries({}, optional=domains))}
            for name in COMPONENTS
        ]
    return row


@st.composite
def plans(draw) -> dict[str, Any]:
    layers = draw(st.lists(layer_names, unique=True, max_size=6))
    return {"schema": SCHEMA, "layers": [draw(plan_rows(layer)) for layer in layers]}


@st.composite
def jobs(draw):
    """A plan, a model with its blocks and more, and an allocation."""
    plan = draw(plans())
    planned = [row["layer"] for row in plan["layers"]]
    layers = planned + draw(st.lists(layer_names.filter(lambda n: n not in planned), max_size=3))
    layers = draw(st.permutations(sorted(set(layers)))) or ["only"]
    width = st.integers(1, 2000)
    facts = ModelFacts(
        tuple(
            AttentionFacts(
                layer, draw(width), (draw(width), draw(width), draw(width)), ("x", "x", "x")
            )
            for layer in layers
        )
    )
    allocated = {f"{layer}.{name}": draw(bits) for layer in layers for name in COMPONENTS}
    return plan, facts, draw(codebooks), draw(scales), allocated


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from([SCHEMA, "split", "fused_uniform", "mcg", "q_proj", L3, L7]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["schema", "layers", "layer", "variant", "K", "name", "projections"])
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Paths of every value inside a document."""
    found = [path]
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            found += places(item, (*path, key))
    return found


def put(document: Any, path: tuple, value: Any) -> Any:
    if not path:
        return value
    result = json.loads(json.dumps(document))
    target = result
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return result


def only_topology_errors(function, *arguments) -> None:
    message = ""
    try:
        function(*arguments)
    except TopologyError as error:
        message = str(error)
    assert message.isprintable()


@FEW
@given(plans(), st.randoms(use_true_random=False))
def test_a_plan_survives_its_canonical_json_and_any_row_order(document, random):
    plan = parse_plan(text(document), "plan.json")
    again = parse_plan(plan.to_json(), "job")
    assert again == plan
    assert again.to_json() == plan.to_json()
    random.shuffle(document["layers"])
    assert parse_plan(json.dumps(document, indent=2, ensure_ascii=False), "x") == plan


@FEW
@given(jobs())
def test_what_is_resolved_is_declared_parsed_and_validated_back(job):
    document, facts, codebook, scale, allocated = job
    plan = parse_plan(text(document), "plan.json")
    topology = resolve_plan(plan, facts, codebook, scale, allocated)
    assert sorted(row.layer for row in topology.rows) == [row.layer for row in topology.rows]
    assert {row.layer for row in topology.rows} == {block.layer for block in facts.attention}
    declaration = parse_declaration_text(topology.to_compact_json(), "shard")
    assert declaration.rows == topology.rows
    assert parse_declaration(topology.to_obj(), "config.json") == declaration
    assert json.loads(topology.to_compact_json()) == topology.to_obj()
    check_copies(topology, {"shard": topology.to_compact_json()}, required=True)
    tensors = inventory_of(topology, facts)
    assert validate_declaration(declaration, facts, tensors, "out") == topology


@FEW
@given(jobs(), st.data())
def test_any_single_tensor_removed_or_changed_is_noticed(job, data):
    document, facts, codebook, scale, allocated = job
    plan = parse_plan(text(document), "plan.json")
    topology = resolve_plan(plan, facts, codebook, scale, allocated)
    tensors = inventory_of(topology, facts)
    declared = [name for name in tensors if name.rpartition(".")[0] in set(topology.projections())]
    name = data.draw(st.sampled_from(declared))
    meta = tensors.pop(name)
    if data.draw(st.booleans()):
        tensors[name] = type(meta)((*meta.shape, 2), meta.dtype)
    declaration = parse_declaration(topology.to_obj(), "config.json")
    try:
        validate_declaration(declaration, facts, tensors, "out")
    except TopologyError:
        return
    raise AssertionError(f"{name} was not missed")


@MANY
@given(json_values)
def test_any_json_value_gives_a_result_or_a_topology_error(value):
    only_topology_errors(parse_plan, text(value), "f")
    only_topology_errors(parse_declaration, value, "f")
    only_topology_errors(parse_declaration_text, text(value), "f")
    only_topology_errors(declaration_in_config, text(value), "f")
    only_topology_errors(check_copies, sample_topology(), {"f": value})
    only_topology_errors(check_tensor_storage, sample_topology(), value)


@MANY
@given(json_values, st.data())
def test_any_value_anywhere_in_a_good_document_gives_a_result_or_a_topology_error(value, data):
    for document, parse in (
        (PLAN, lambda changed: parse_plan(text(changed), "f")),
        (sample_topology().to_obj(), lambda changed: parse_declaration(changed, "f")),
    ):
        path = data.draw(st.sampled_from(places(document)))
        only_topology_errors(parse, put(document, path, value))


@MANY
@given(st.binary(max_size=64) | st.text(max_size=64))
def test_any_text_or_bytes_gives_a_result_or_a_topology_error(document):
    only_topology_errors(parse_plan, document, "f")
    only_topology_errors(declaration_in_config, document, "f")


@MANY
@given(st.data())
def test_a_damaged_byte_gives_a_result_or_a_topology_error(data):
    document = bytearray(text(PLAN).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        document[data.draw(st.integers(0, len(document) - 1))] = data.draw(st.integers(0, 255))
    only_topology_errors(parse_plan, bytes(document), "f")


@FEW
@given(st.data())
def test_a_changed_declaration_is_refused_or_read_as_it_stands(data):
    topology = sample_topology()
    document = topology.to_obj()
    path = data.draw(st.sampled_from(places(document)))
    value = data.draw(json_values)
    changed = put(document, path, value)
    try:
        result = parse_declaration(changed, "f")
    except TopologyError:
        return
    assert result.to_obj() == changed
