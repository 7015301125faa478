"""The tables of docs/eviction.md, and which goals are reached."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eviction_cases import EXPONENTS, MAIN, OTHER_SEEDS, SESSIONS, TITLES, Case, Row, Rows, sessions_of
from eviction_reference import CAPACITIES, CHAIN_GOALS, GOALS, NEVER_BELOW, SIMULATED, ChainGoal, Goal

from kvtier.lab.replay.models import POLICIES
from kvtier.lab.replay.replay import TIERS


def both(row: Row | tuple[float, float] | None) -> str:
    """Hit rate / compute saved."""
    if row is None:
        return "-"
    hit, saved = (row.hit, row.saved) if isinstance(row, Row) else row
    return f"{hit:.3f} / {saved:.3f}"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table; the first column is text."""
    ruler = ["---", *["---:"] * (len(columns) - 1)]
    return ["| " + " | ".join(row) + " |" for row in (columns, ruler, *rows)]


def verdict(reached: bool) -> str:
    return "ok" if reached else "**missed**"


def gap(rows: Rows, workload: str, capacity: int, row: Row, seed: int = 0) -> str:
    """The share of the gap in hits from lru to belady that a row closes."""
    low = rows.at(workload, "lru", capacity, seed).hit
    high = rows.at(workload, "belady", capacity, seed).hit
    return f"{100 * (row.hit - low) / (high - low):.0f} %" if high - low >= 0.005 else "-"


def goal_reached(rows: Rows, goal: Goal) -> bool:
    row = rows.at(goal.workload, "rvi", goal.capacity)
    return row.hit >= goal.least[0] and row.saved >= goal.least[1]


def goals_table(rows: Rows, workloads: Sequence[str]) -> list[str]:
    """rvi against its goals."""
    lines = []
    for goal in (goal for goal in GOALS if goal.workload in workloads):
        row = rows.at(goal.workload, "rvi", goal.capacity)
        lines.append(
            (
                goal.workload,
                f"{goal.capacity:,}",
                both(rows.at(goal.workload, "lru", goal.capacity)),
                both(goal.published),
                f"**{both(row)}**",
                both(rows.at(goal.workload, "belady", goal.capacity)),
                gap(rows, goal.workload, goal.capacity, row),
                both(goal.least),
                verdict(goal_reached(rows, goal)),
            )
        )
    return markdown(
        ("workload", "blocks", "lru", "best published", "rvi", "belady", "gap closed", "goal", ""), lines
    )


def losses(rows: Rows, workloads: Sequence[str]) -> list[tuple[str, int, float]]:
    """Hits of rvi over those of lru, everywhere."""
    return [
        (workload, capacity, rows.at(workload, "rvi", capacity).hit - rows.at(workload, "lru", capacity).hit)
        for workload in workloads
        for capacity in CAPACITIES[workload]
    ]


def guard_table(rows: Rows, workloads: Sequence[str]) -> list[str]:
    """What the guard is for: rvi with and without it beside lru."""
    lines = []
    for workload, capacity, gain in losses(rows, workloads):
        guarded, bare = (rows.find(workload, name, capacity) for name in ("rvi", "rvi-noguard"))
        lines.append(
            (
                workload,
                f"{capacity:,}",
                both(rows.at(workload, "lru", capacity)),
                both(bare),
                both(guarded),
                f"{gain:+.3f}",
                verdict(gain >= -NEVER_BELOW),
            )
        )
    return markdown(("workload", "blocks", "lru", "rvi without guard", "rvi", "hits over lru", ""), lines)


def policies_table(rows: Rows, workload: str, ideal: dict[str, float]) -> list[str]:
    """Every policy at every size of a workload."""
    capacities = CAPACITIES[workload]
    named = [(policy, policy, 0.25) for policy in POLICIES if policy not in ("rvi", "belady")]
    ours = [("rvi", "rvi", 0.25), *((f"rvi, exponent {a:g}", "rvi", a) for a in EXPONENTS)]
    lines = []
    for label, policy, exponent in (*named, *ours, ("belady", "belady", 0.25)):
        cells = [both(rows.find(workload, policy, size, exponent=exponent)) for size in capacities]
        bold = "**" if label == "rvi" else ""
        lines.append((label, *(f"{bold}{cell}{bold}" for cell in cells)))
    lines.append(("infinite cache", *len(capacities) * [f"{ideal['hit']:.3f} / {ideal['saved']:.3f}"]))
    return markdown(("policy", *(f"{size:,}" for size in capacities)), lines)


def simulated_differences(rows: Rows, workloads: Sequence[str]) -> list[tuple[str, str, float]]:
    """By workload and policy, the largest difference to the simulator, in hits or compute."""
    found = []
    for workload in workloads:
        for policy, figures in SIMULATED[workload].items():
            pairs = zip(CAPACITIES[workload], figures, strict=True)
            ours = [(rows.at(workload, policy, size), both) for size, both in pairs]
            worst = max(max(abs(r.hit - hit), abs(r.saved - saved)) for r, (hit, saved) in ours)
            found.append((workload, policy, worst))
    return found


def simulated_table(rows: Rows, workloads: Sequence[str]) -> list[str]:
    """How near four policies come to the simulator."""
    found = {(workload, policy): worst for workload, policy, worst in simulated_differences(rows, workloads)}
    policies = list(SIMULATED["conv"])
    lines = [(workload, *(f"{found[workload, policy]:.4f}" for policy in policies)) for workload in workloads]
    return markdown(("largest difference", *policies), lines)


def chains_table(rows: Rows) -> list[str]:
    """Tier chains."""
    lines = []
    for goal in CHAIN_GOALS:
        for policy in ("lru", "rvi"):
            row = rows.find(goal.workload, policy, sum(goal.pages), tiers=goal.pages)
            if row is None:
                continue
            is_ours = policy == "rvi"
            lines.append(
                (
                    goal.workload,
                    " : ".join(f"{pages:,}" for pages in goal.pages),
                    policy,
                    f"{row.hit:.3f}",
                    " / ".join(f"{row.by_tier[tier]:.3f}" for tier in TIERS),
                    f"{row.ssd_per_page:.3f}",
                    f"**{row.time_saved:.3f}**" if is_ours else f"{row.time_saved:.3f}",
                    f"{goal.least:.3f}" if is_ours else f"({goal.simulated_lru:.3f})",
                    verdict(chain_reached(rows, goal)) if is_ours else "",
                )
            )
    return markdown(
        (
            *("workload", "L1 : L2 : L3 : L4", "policy", "hit", "L1 / L2 / L3 / L4"),
            *("written to SSD per block", "time saved", "goal", ""),
        ),
        lines,
    )


def chain_reached(rows: Rows, goal: ChainGoal) -> bool:
    return rows.at(goal.workload, "rvi", sum(goal.pages), tiers=goal.pages).time_saved >= goal.least


def sessions_table(rows: Rows) -> list[str]:
    """What it is worth to be told that a session is over."""
    lines = []
    for workload, capacities in SESSIONS.items():
        told = sessions_of(workload)
        for size in capacities:
            pairs = [
                rows.at(told, policy, size, session_ends=ends)
                for policy in ("lru", "rvi")
                for ends in (False, True)
            ]
            lines.append(
                (
                    workload,
                    f"{size:,}",
                    *(both(row) for row in pairs),
                    both(rows.at(workload, "belady", size)),
                    *(gap(rows, workload, size, row) for row in pairs[1:]),
                )
            )
    return markdown(
        (
            *("workload", "blocks", "lru", "lru, told", "rvi", "rvi, told", "belady"),
            *("gap: lru, told", "gap: rvi", "gap: rvi, told"),
        ),
        lines,
    )


def seeds_table(rows: Rows) -> list[str]:
    """Workloads that nothing was tuned on."""
    lines = []
    for (workload, seed), capacities in OTHER_SEEDS.items():
        for size in capacities:
            row = rows.at(workload, "rvi", size, seed)
            cells = [both(rows.at(workload, policy, size, seed)) for policy in MAIN if policy != "rvi"]
            lines.append(
                (
                    f"{workload}, seed {seed}",
                    f"{size:,}",
                    *cells[:-1],
                    f"**{both(row)}**",
                    cells[-1],
                    gap(rows, workload, size, row, seed),
                )
            )
    return markdown(("workload", "blocks", *MAIN, "gap closed"), lines)


def speed_table(rows: Rows, workloads: Sequence[str]) -> list[str]:
    """CPU time of a replay, per block asked for, the slowest size."""
    names = [
        policy
        for policy in POLICIES
        if all(Case(w, 0, policy, size) in rows for w in workloads for size in CAPACITIES[w])
    ]
    lines = [
        (
            policy,
            *(f"{max(rows.at(w, policy, size).cpu_us for size in CAPACITIES[w]):.2f}" for w in workloads),
        )
        for policy in names
    ]
    return markdown(("us of CPU per block", *workloads), lines)


def workloads_table(ideal: dict[str, dict[str, float]]) -> list[str]:
    """What was replayed."""
    lines = [
        (
            TITLES[name],
            name,
            *(f"{ideal[f'{name}.0'][what]:,.0f}" for what in ("requests", "references", "distinct")),
            f"{ideal[f'{name}.0']['hit']:.3f} / {ideal[f'{name}.0']['saved']:.3f}",
        )
        for name in CAPACITIES
    ]
    columns = ("workload", "name", "requests", "blocks asked for", "distinct", "infinite cache")
    return markdown(columns, lines)
