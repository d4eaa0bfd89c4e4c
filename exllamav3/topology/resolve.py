"""From a plan and a model to the resolved topology, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping

from exllamav3.errors import TopologyError
from exllamav3.topology.facts import AttentionFacts, ModelFacts
from exllamav3.topology.json_node import show, show_list
from exllamav3.topology.plan import Plan, PlannedProjection, PlanRow
from exllamav3.topology.resolved import Projection, ResolvedTopology, TopologyRow
from exllamav3.topology.schema import CODEBOOKS, COMPONENTS, MAX_BITS, MIN_BITS, SCALES


def check_plan(plan: Plan, facts: ModelFacts, job_codebook: str, job_scale: str) -> None:
    """Refuse a plan that does not fit the model or the job; needs no bit allocation.

    Args:
        plan: a parsed plan; an empty one is checked like any other.
        facts: the model's attention blocks.
        job_codebook: the job's codebook; with a plan it must be "mcg" or "mul1".
        job_scale: the job's output scale policy, "always", "never" or "auto".

    Raises:
        TopologyError: the model has no full attention, the job is outside the domain of
            the schema, or a row names no full-attention block of the text decoder.
    """
    if not facts.attention:
        raise TopologyError(
            f"{plan.where}: this model has no full-attention block in its text decoder, but a "
            f"QKV topology plan needs at least one. Convert without a plan."
        )
    _check_job("codebook", job_codebook, CODEBOOKS, "--codebook")
    _check_job("output scale policy", job_scale, SCALES, "--out_scales")
    for row in sorted(plan.rows, key=lambda row: row.index):  # as a reader goes through the file
        facts.require(row.layer, plan.node(row))


def _check_job(name: str, found: str, domain: tuple[str, ...], flag: str) -> None:
    if found not in domain:
        raise TopologyError(
            f"job settings, {flag}: the {name} is {show(found)}, but with a QKV topology plan it "
            f"must be one of {show_list(domain)}. Choose one of these, or convert without a plan."
        )


def resolve_plan(
    plan: Plan,
    facts: ModelFacts,
    job_codebook: str,
    job_scale: str,
    allocated: Mapping[str, int],
) -> ResolvedTopology:
    """Decide the storage of every full-attention block of the text decoder.

    Args:
        plan, facts, job_codebook, job_scale: as for `check_plan`, which is repeated here.
        allocated: K that the job's allocation gives each split projection, by module key
            `<layer>.q_proj`. Only those are read that the plan leaves to the job.

    Returns:
        One row per block, in plain string order. Blocks the plan does not list are split.

    Raises:
        TopologyError: `check_plan` refuses, or a split projection gets no integer K in 3..8.
    """
    check_plan(plan, facts, job_codebook, job_scale)
    planned = {row.layer: row for row in plan.rows}
    rows: list[TopologyRow] = []
    for block in sorted(facts.attention, key=lambda block: block.layer):
        row = planned.get(block.layer)
        if row is None or not row.projections:
            row = PlanRow(block.layer, "split", tuple(map(PlannedProjection, COMPONENTS)))
        projections = tuple(
            Projection(
                stated.name,
                stated.bits if stated.bits is not None else _allocated(block, stated, allocated),
                stated.codebook or job_codebook,
                stated.scale or job_scale,
            )
            for stated in row.projections
        )
        rows.append(TopologyRow(block.layer, block.output_splits, projections))
    return ResolvedTopology(tuple(rows))


def _allocated(
    block: AttentionFacts, projection: PlannedProjection, allocated: Mapping[str, int]
) -> int:
    key = f"{block.layer}.{projection.name}"
    bits: object = allocated.get(key)
    if isinstance(bits, int) and not isinstance(bits, bool) and MIN_BITS <= bits <= MAX_BITS:
        return bits
    found = "no K" if bits is None else f"K={show(bits)}"
    raise TopologyError(
        f"job settings, --bits: {show(key)} gets {found} from the bit allocation, but with a QKV "
        f"topology plan every q, k and v needs an integer K from {MIN_BITS} to {MAX_BITS}. Ask "
        f"for {MIN_BITS} to {MAX_BITS} bits, or state its K in the plan."
    )


def check_resumed_plan(stored: Plan | None, given: Plan | None) -> None:
    """Refuse to resume a job with another plan; no plan given keeps the stored one.

    Raises:
        TopologyError: a plan is given and its content differs from the job's.
    """
    if given is None or stored == given:
        return
    start = f"{given.where}: the plan differs from the one this job was started with"
    advice = "Resume without a plan to keep the job's own, or start a new job."
    if stored is None:
        raise TopologyError(f"{start}, which had none. {advice}")
    before = {row.layer: row for row in stored.rows}
    after = {row.layer: row for row in given.rows}
    for layer in sorted({*before, *after}):
        if before.get(layer) != after.get(layer):
            raise TopologyError(
                f"{start}: layer {show(layer)} was {_summary(before.get(layer))} and is now "
                f"{_summary(after.get(layer))}. {advice}"
            )


def _summary(row: PlanRow | None) -> str:
    if row is None:
        return "not listed"
    parts = [
        " ".join([p.name, *(f"{key}={value}" for key, value in p.settings().items())])
        for p in row.projections
    ]
    return f"{row.variant} ({'; '.join(parts)})" if parts else row.variant
