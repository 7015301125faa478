"""Draws curves as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FEW = 8  # curves or sizes


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of one line, from left to right. A `reference` is drawn dashed and gray."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    reference: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes. `level` is a horizontal line: its height and what it means; one curve may be `highlighted`."""

    title: str
    xlabel: str
    ylabel: str
    curves: Sequence[Curve]
    log_x: bool = False
    log_y: bool = False
    level: tuple[float, str] | None = None
    highlighted: str = ""


def draw(panels: Sequence[Panel], file: Path) -> None:
    """A PNG with the panels side by side. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # half a second that only plots should cost
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 + 6.5 * len(panels), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw_panel(axes, panel)
    figure.savefig(file, dpi=130, format="png")


def _draw_panel(axes: Axes, panel: Panel) -> None:
    for number, curve in enumerate(panel.curves):
        look = {"color": "gray", "linestyle": "--"} if curve.reference else _look(number, len(panel.curves))
        width = 2.8 if curve.label == panel.highlighted else 1.4
        axes.plot(curve.x, curve.y, label=curve.label, markersize=4, linewidth=width, **look)
    if panel.level is not None:
        axes.axhline(panel.level[0], color="gray", linestyle=":", label=panel.level[1])
    axes.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
    if panel.log_x:
        _log_ticks(axes, sorted({x for curve in panel.curves for x in curve.x}))
    aside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
    axes.legend(fontsize="small", **(aside if len(panel.curves) > _FEW else {}))
    axes.grid(alpha=0.3)


def _look(number: int, curves: int) -> dict[str, Any]:
    """Colours that differ, however many curves there are up to 20."""
    if curves <= _FEW:
        return {"marker": "o", "color": f"C{number}"}
    from matplotlib import colormaps

    return {"marker": "os^Dv"[number % 5], "color": colormaps["tab20"](number % 20)}


def _log_ticks(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis with the values themselves on it, where they are few."""
    axes.set_xscale("log")
    if len(values) <= _FEW:
        axes.set_xticks(values, [f"{value:,.4g}" if value < 1 else f"{value:,.0f}" for value in values])
        axes.minorticks_off()
