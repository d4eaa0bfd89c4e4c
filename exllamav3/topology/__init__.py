"""QKV topology `exl3_qkv_topology/1`: how each full-attention block stores q, k and v.

Standard library and `exllamav3.errors` only; works where torch is not installed.
The way through the package:

    load_plan / parse_plan        JSON -> Plan, proven well formed
    check_plan, resolve_plan      Plan x ModelFacts -> ResolvedTopology (producer)
    parse_declaration             JSON -> Declaration, proven well formed
    validate_declaration          Declaration x ModelFacts x tensors -> ResolvedTopology (consumer)

Only a ResolvedTopology reaches modules and converter. See docs/qkv_topology.md.
"""

from exllamav3.topology.consumer import validate_declaration
from exllamav3.topology.copies import check_copies
from exllamav3.topology.declaration import (
    Declaration,
    declaration_in_config,
    parse_declaration,
    parse_declaration_text,
)
from exllamav3.topology.facts import AttentionFacts, ModelFacts, TensorMeta
from exllamav3.topology.payload import check_payload, check_undeclared
from exllamav3.topology.plan import Plan, PlannedProjection, PlanRow, load_plan, parse_plan
from exllamav3.topology.resolve import check_plan, check_resumed_plan, resolve_plan
from exllamav3.topology.resolved import Projection, ResolvedTopology, TopologyRow
from exllamav3.topology.schema import (
    COMPONENTS,
    CONFIG_PATH,
    FUSED_NAME,
    METADATA_KEY,
    SCALES,
    SCHEMA,
)
from exllamav3.topology.source import check_source
from exllamav3.topology.tensor_storage import check_tensor_storage, storage_annotation

__all__ = [
    "COMPONENTS",
    "CONFIG_PATH",
    "FUSED_NAME",
    "METADATA_KEY",
    "SCALES",
    "SCHEMA",
    "AttentionFacts",
    "Declaration",
    "ModelFacts",
    "Plan",
    "PlanRow",
    "PlannedProjection",
    "Projection",
    "ResolvedTopology",
    "TensorMeta",
    "TopologyRow",
    "check_copies",
    "check_payload",
    "check_plan",
    "check_resumed_plan",
    "check_source",
    "check_tensor_storage",
    "check_undeclared",
    "declaration_in_config",
    "load_plan",
    "parse_declaration",
    "parse_declaration_text",
    "parse_plan",
    "resolve_plan",
    "storage_annotation",
    "validate_declaration",
]
