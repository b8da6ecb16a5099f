"""Whether the chains of a sampler have mixed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_trace(clf: Any, *, n_traces: int = 6) -> Figure:
    """Draw what the chains of a fitted sampler did: each in its own colour, draw by draw.

    The log-likelihood comes first, then the quantities that have mixed worst. Chains that have
    mixed lie on each other, like grass; one that keeps apart or drifts has not.

    Parameters
    ----------
    clf : GibbsGPClassifier
        A fitted sampler.
    n_traces : int, default=6
        Number of quantities, at most.
    """
    traces = clf.traces(n_traces)
    figure, axes = _panels(len(traces), 2, (9.0, 1.5), (1, 4))
    for (name, trace), (left, right) in zip(traces.items(), axes, strict=True):
        bins = np.linspace(trace.min(), trace.max(), 2 * _bins(trace.shape[1]) + 1)
        if not bins[0] < bins[-1]:
            bins = np.array([bins[0] - 0.5, bins[0] + 0.5])
        for i, chain in enumerate(trace):
            color = f"C{i % 10}"
            left.hist(chain, bins, histtype="step", color=color, lw=1, orientation="horizontal")
            right.plot(np.arange(1, len(chain) + 1), chain, color=color, lw=0.6, alpha=0.8)
        right.set_title(name, loc="left", fontsize="medium")
        right.set_xlim(1, max(2, trace.shape[1]))
        left.sharey(right)
        left.set_xticks([])
        right.tick_params(labelleft=False)
    axes[-1][1].set_xlabel("draw")
    axes[-1][0].set_xlabel("density")
    return figure


def plot_ranks(clf: Any, *, n_traces: int = 6) -> Figure:
    """Draw how the ranks of each chain's draws among all draws are distributed.

    Chains that have mixed have flat lines; the grey band holds 95 % of the values that
    independent draws would give. Quantities and parameters are those of :func:`plot_trace`.
    """
    traces = clf.traces(n_traces)
    columns = min(3, len(traces))
    figure, axes = _panels(-(-len(traces) // columns), columns, (9.0, 2.2), None)
    for ax, (name, trace) in zip(axes.flat, traces.items(), strict=False):
        n_chains, n = trace.shape
        n_bins = _bins(n)
        # Ties, as among draws of a step that stayed, share their places at random.
        shuffled = np.random.default_rng(0).permutation(trace.size)
        order = np.lexsort((shuffled, trace.ravel()))
        ranks = np.empty(trace.size)
        ranks[order] = (np.arange(trace.size) + 0.5) / trace.size
        edges = np.linspace(0, 1, n_bins + 1)
        counts = [
            np.histogram(chain, edges)[0] / n * n_bins for chain in ranks.reshape(trace.shape)
        ]
        margin = 1.96 * np.sqrt((n_bins - 1) * (1 - 1 / n_chains) / n)
        ax.axhspan(max(0, 1 - margin), 1 + margin, color="0.9", lw=0)
        for i, heights in enumerate(counts):
            ax.stairs(heights, edges, color=f"C{i % 10}", lw=1.4, baseline=None)
        ax.set_title(name, loc="left", fontsize="medium")
        ax.set(xlim=(0, 1), ylim=(0, None), xticks=(0, 0.5, 1))
    for ax in axes.flat[len(traces) :]:
        ax.set_visible(False)
    figure.supxlabel("rank among the draws of all chains", fontsize="medium")
    figure.supylabel("share, 1 if even", fontsize="medium")
    return figure


def _bins(n: int) -> int:
    """Bins for so many draws of a chain."""
    return int(np.clip(n // 25, 5, 20))


def _panels(
    rows: int, columns: int, size: tuple[float, float], widths: tuple[int, ...] | None
) -> tuple[Figure, Any]:
    """A figure with rows of the same height, and its axes (rows, columns)."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        rows,
        columns,
        figsize=(size[0], 0.6 + size[1] * rows),
        layout="constrained",
        squeeze=False,
        width_ratios=widths,
    )
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes
