"""Draws figures of embedding spaces of several models, as in Moiseev et al. 2023 and Chuang 2024."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QUERY, PASSAGE = "#0072B2", "#D55E00"  # colours that colour-blind readers can distinguish (Okabe and Ito)
LINES = ("#000000", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#D55E00")
WIDTH = 3.4  # inches; the width of a column of a paper
DPI = 200  # dots per inch
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "axes.linewidth": 0.6,
}
RATIO_RANGE = (-1.0, 3.0)  # the ratios of similarities that figure6.png shows
COLUMNS = 72  # maximum number of characters per line of text in `word_heat`


def towers(points: Mapping[str, tuple[np.ndarray, np.ndarray]], path: Path) -> None:
    """Draws Figure 1 of Moiseev et al. 2023: t-SNE of queries [N, 2], passages [N, 2]; a panel per model."""
    with _sheet(path, panels=len(points), height=WIDTH + 0.35) as (figure, panels):
        for axes, (name, (queries, passages)) in zip(panels, points.items(), strict=True):
            # Draw points in a random order, so that neither tower covers the other.
            everything = np.concatenate([queries, passages])
            colours = np.repeat([QUERY, PASSAGE], [len(queries), len(passages)])
            order = np.random.default_rng(0).permutation(len(everything))
            axes.scatter(*everything[order].T, c=colours[order], s=4, alpha=0.6, linewidths=0)
            axes.set(title=name, xticks=[], yticks=[], aspect="equal", adjustable="datalim")
            axes.spines[["top", "right"]].set_visible(True)
        for colour, label in ((QUERY, "queries"), (PASSAGE, "passages")):
            panels[0].scatter([], [], c=colour, s=16, label=label)
        figure.legend(loc="outside lower center", ncols=2, handletextpad=0.2)


def nearest(similarities: Mapping[str, np.ndarray], path: Path) -> None:
    """Draws Figure 5 of Moiseev et al. 2023: distributions of queries' cosines [Q] to the nearest passage."""
    edges = _edges(similarities.values())
    with _sheet(path, width=1.4 * WIDTH) as (_, (axes,)):
        # Clip at 1, because rounding may make a cosine slightly larger.
        _histograms(axes, {name: np.minimum(x, 1.0) for name, x in similarities.items()}, edges)
        axes.set(xlabel="cosine similarity of a query and its nearest passage", xlim=(edges[0], 1.0))


def ratios(values: Mapping[str, np.ndarray], path: Path) -> None:
    """Draws Figure 6 of Moiseev et al. 2023: distributions of query-query over query-passage similarity [S].

    Ratios outside `RATIO_RANGE` are not shown, but the density is normalised with them.
    """
    with _sheet(path, width=1.4 * WIDTH) as (_, (axes,)):
        _histograms(axes, values, np.linspace(*RATIO_RANGE, 121))
        axes.axvline(1.0, color="0.6", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
        axes.set(xlabel=r"$\mathrm{sim}(q_i, q_j)\ /\ \mathrm{sim}(q_i, p_j)$", xlim=RATIO_RANGE)


def ratings(cosines: Mapping[str, Mapping[str, np.ndarray]], path: Path) -> None:
    """Draws figure 2-2 of Chuang 2024: cosine similarities [N] by group of ratings, a panel per model.

    Groups are stacked, with the lowest rating at the bottom. All groups of a model have the same scale.
    """
    edges = _edges(x for groups in cosines.values() for x in groups.values())
    names = list(dict.fromkeys(group for groups in cosines.values() for group in groups))
    shares = {
        (model, group): np.histogram(np.minimum(x, 1.0), edges)[0] / len(x)
        for model, groups in cosines.items()
        for group, x in groups.items()
    }
    with _sheet(path, panels=len(cosines)) as (_, panels):
        for axes, (model, groups) in zip(panels, cosines.items(), strict=True):
            height = max(float(shares[model, group].max()) for group in groups) / 0.9
            for group, values in groups.items():
                at = names.index(group)
                colour = LINES[at % len(LINES)]
                tops = at + shares[model, group] / height
                axes.stairs(tops, edges, baseline=at, fill=True, color=colour, alpha=0.35)
                axes.stairs(tops, edges, baseline=at, color=colour, linewidth=0.8)
                axes.plot([np.median(values)] * 2, [at, at + 0.9], color="0.3", linewidth=0.8)
            axes.set(title=model, xlabel="cosine similarity", xlim=(edges[0], 1.0), ylim=(0, len(names)))
            axes.set_yticks(np.arange(len(names)) + 0.45, names)
            axes.tick_params(axis="y", length=0)
        panels[0].set(ylabel="people's rating")


def word_heat(texts: Mapping[str, Sequence[Sequence[tuple[str, float]]]], path: Path) -> None:
    """Draws table 4 of Ma et al. 2022, a panel per model: the more probable a word, the darker its shade.

    Args:
      texts: {model name: texts}; a text is a list of (word, probability). Shades are relative to the maximum
        of a text.
      path: the PNG to write.
    """
    width, laid_out = 1.6 * WIDTH, {name: _laid_out(of_model) for name, of_model in texts.items()}
    lines = 1 + max((line for words in laid_out.values() for _, _, line, _ in words), default=0)
    with _sheet(path, panels=len(texts), width=width, height=0.4 + 0.19 * lines) as (_, panels):
        for axes, (name, words) in zip(panels, laid_out.items(), strict=True):
            for word, at, line, share in words:
                colour = (PASSAGE, 0.85 * share)
                edges = (at - 0.25, at + len(word) + 0.25)
                axes.fill_betweenx([line - 0.5, line + 0.5], *edges, color=colour, linewidth=0)
                axes.text(
                    at + len(word) / 2, line, word, family="monospace", size=7, ha="center", va="center"
                )
            axes.set(title=name, xlim=(-0.5, COLUMNS + 0.5), ylim=(lines - 0.5, -0.5), xticks=[], yticks=[])
            axes.spines[["left", "bottom"]].set_visible(False)


def _laid_out(texts: Sequence[Sequence[tuple[str, float]]]) -> list[tuple[str, int, int, float]]:
    """Returns each word's text, column, line, and probability divided by the maximum of its text."""
    found, line = [], 0
    for words in texts:
        at, greatest = 0, max((share for _, share in words), default=0.0) or 1.0
        for word, share in words:
            if at and at + len(word) > COLUMNS:
                at, line = 0, line + 1
            found.append((word, at, line, share / greatest))
            at += len(word) + 1
        line += 2
    return found


def _edges(samples: Iterable[np.ndarray]) -> np.ndarray:
    """Returns the edges of 40 histogram bins, from the minimum cosine similarity, rounded down, to 1."""
    low = min(float(np.min(values)) for values in samples)
    # The bins begin at 0.95 if all cosines are 1.
    return np.linspace(min(np.floor(low * 20) / 20, 0.95), 1.0, 41)


def _histograms(axes: Axes, samples: Mapping[str, np.ndarray], edges: np.ndarray) -> None:
    for number, (name, values) in enumerate(samples.items()):
        density = np.histogram(values, edges)[0] / max(len(values), 1) / np.diff(edges)
        colour = LINES[number % len(LINES)]
        axes.stairs(density, edges, fill=True, color=colour, alpha=0.12, zorder=1)
        axes.stairs(density, edges, color=colour, linewidth=1.2, label=name, zorder=2)
    axes.set(ylabel="density", ylim=(0, None))
    axes.legend(loc="best")


@contextlib.contextmanager
def _sheet(
    path: Path, *, panels: int = 1, width: float = WIDTH, height: float = 2.6
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yields a figure with `panels` axes side by side; on exit writes the figure to `path`."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # pyplot would keep global state and could open windows

    with rc_context(STYLE):
        figure = Figure(figsize=(panels * width, height), layout="constrained", dpi=DPI)
        yield figure, list(figure.subplots(1, panels, squeeze=False)[0])
        figure.savefig(path, metadata={"Software": None})
