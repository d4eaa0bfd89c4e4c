"""The QKV topology that a checkpoint declares, proven against everything that can contradict it.

config.json is the authority; quantization_config.json, shard headers and the index may carry
copies. All of this happens before the first weight is read.
"""

from __future__ import annotations

from exllamav3.errors import TopologyError
from exllamav3.model.config import Config
from exllamav3.model.fields import read_json_object
from exllamav3.topology import (
    CONFIG_PATH,
    FUSED_NAME,
    METADATA_KEY,
    ModelFacts,
    ResolvedTopology,
    check_copies,
    check_undeclared,
    declaration_in_config,
    validate_declaration,
)


def read_topology(config: Config, facts: ModelFacts) -> ResolvedTopology | None:
    """The declared topology, None where nothing is declared and every block is split.

    Raises:
        TopologyError: the declaration is malformed, does not describe this model or its tensors,
            a copy differs, or a copy or a fused payload exists without a declaration.
    """
    if config.directory is None or config.quantization is None:
        return None
    copies = _copies(config)
    if config.quantization.qkv_topology is None:
        _check_nothing_declared(config, facts, copies)
        return None
    path = config.directory / "config.json"
    declaration = declaration_in_config(path.read_bytes(), str(path))
    assert declaration is not None
    check_copies(declaration, copies)
    inventory = config.files.inventory()
    return validate_declaration(declaration, facts, inventory, str(config.directory))


def _check_nothing_declared(config: Config, facts: ModelFacts, copies: dict[str, object]) -> None:
    if copies:
        raise TopologyError(
            f"{next(iter(copies))}: carries a QKV topology declaration, but "
            f"{config.top.where} has none at {CONFIG_PATH}; restore the config.json of the "
            f"conversion"
        )
    if any(name.endswith(f".{FUSED_NAME}.trellis") for name in config.tensor_names()):
        check_undeclared(facts, config.files.inventory(), str(config.directory))


def _copies(config: Config) -> dict[str, object]:
    """Every copy of the declaration there is, by file and JSON path."""
    assert config.directory is not None
    copies: dict[str, object] = {}
    path = config.directory / "quantization_config.json"
    if path.is_file():
        obj = read_json_object(path)
        if METADATA_KEY in obj:
            copies[f"{path}, {METADATA_KEY}"] = obj[METADATA_KEY]
    for header in config.files.headers.values():
        if METADATA_KEY in header.metadata:
            copies[f"{header.path}, __metadata__.{METADATA_KEY}"] = header.metadata[METADATA_KEY]
    index = config.files.index
    if index is not None and METADATA_KEY in index.metadata:
        copies[f"{index.path}, metadata.{METADATA_KEY}"] = index.metadata[METADATA_KEY]
    return copies
