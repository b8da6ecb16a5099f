"""How much each feature matters to the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from conjugp.kernels import Kernel
from conjugp.plotting._style import COLORS, Display, feature_names, numbers, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class RelevanceDisplay(Display):
    """Relevance of features: the correlation lost when one of them alone changes.

    A lengthscale has the unit of its feature, and says nothing without the feature's spread. So
    a feature of a row takes its value in another row drawn at random, all other features stay,
    and the relevance is what this takes off the prior correlation of the latent function at the
    two, on average: 0 for a feature that does not matter, towards 1 for one that alone makes rows
    unlike. For small relevances and an RBF kernel it is the variance of the feature divided by
    the squared lengthscale. Make one with :meth:`from_estimator`, which also draws it.

    Parameters
    ----------
    relevance : array-like of shape (n_features,) or (n_kernels, n_features)
        Of one kernel, or of one for each class.
    names : array-like of shape (n_features,)
        What the features are called.

    Attributes
    ----------
    ax_, figure_ : matplotlib Axes and Figure
        Where it was drawn.
    """

    def __init__(self, relevance: ArrayLike, names: ArrayLike) -> None:
        self.relevance: NDArray[np.float64] = np.atleast_2d(np.asarray(relevance, np.float64))
        self.names: NDArray[Any] = np.asarray(names)

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        X: Any,
        *,
        names: ArrayLike | None = None,
        n_rows: int = 200,
        random_state: int = 0,
        max_features: int = 20,
        ax: Axes | None = None,
    ) -> RelevanceDisplay:
        """Draw the relevances in a fitted classifier.

        Parameters
        ----------
        estimator : GPClassifier or GibbsGPClassifier
            A fitted classifier.
        X : array-like of shape (n_samples, n_features)
            Rows whose features say how much they vary, as the training rows.
        names : array-like of shape (n_features,), default=None
            What the features are called; by X or the fit if None.
        n_rows : int, default=200
            Pairs of rows that are averaged over.
        random_state : int, default=0
            Which pairs those are.
        max_features, ax
            As in :meth:`plot`.
        """
        encoder = getattr(estimator, "_encoder", None)
        owners = None
        if encoder is not None:  # features of a column change together
            X, owners = encoder.rows(X), encoder.owners
            names = list(dict.fromkeys(owners)) if names is None else names
        rows = numbers("X", X)
        kernels = estimator.kernel_ if isinstance(estimator.kernel_, list) else [estimator.kernel_]
        found = [relevances(kernel, rows, n_rows, random_state, owners) for kernel in kernels]
        if names is None:
            names = feature_names(estimator, X, rows.shape[1])
        return cls(found, names).plot(ax, max_features=max_features)

    def plot(self, ax: Axes | None = None, *, max_features: int = 20) -> RelevanceDisplay:
        """Draw a bar for each feature, the most relevant first.

        Parameters
        ----------
        ax : matplotlib Axes, default=None
            Where to draw; a new figure if None.
        max_features : int, default=20
            How many, at most.
        """
        mean = self.relevance.mean(axis=0)
        top = np.argsort(-mean, kind="stable")[:max_features]
        ax = self._axes(ax, (6.0, 1.1 + 0.28 * len(top)))
        place = np.arange(len(top))
        ax.barh(place, mean[top], 0.72, color=COLORS[0])
        if len(self.relevance) > 1:
            for each in self.relevance:
                ax.scatter(each[top], place, 12, color="0.15", alpha=0.6, lw=0, zorder=3)
        ax.set(yticks=place, yticklabels=self.names[top], ylim=(len(top) - 0.4, -0.6))
        ax.set(xlabel="correlation lost when the feature changes", xlim=(0, None))
        left = len(mean) - len(top)
        if left:
            ax.set_title(f"{left} less relevant not shown", loc="right", fontsize="small")
        tidy(ax, grid=False)
        ax.grid(axis="x", color="0.92", lw=0.8)
        ax.set_axisbelow(True)
        return self


@torch.no_grad()
def relevances(
    kernel: Kernel,
    X: NDArray[np.float64],
    n_rows: int = 200,
    random_state: int = 0,
    owners: Sequence[str] | None = None,
) -> NDArray[np.float64]:
    """Mean loss of correlation when a feature alone takes its value in another row: (D,).

    With `owners` of the features (D,), when those of one owner do: (number of owners,).
    """
    if n_rows < 1:
        raise ValueError(f"n_rows must be at least 1, got {n_rows}")
    rng = np.random.default_rng(random_state)
    pairs = rng.integers(len(X), size=(n_rows, 2))
    held = list(range(X.shape[1]) if owners is None else owners)
    which = [[d for d, one in enumerate(held) if one == owner] for owner in dict.fromkeys(held)]
    lost = np.zeros(len(which))
    for i, j in pairs:
        row, other = torch.tensor(X[i]), torch.tensor(X[j])
        changed = row.repeat(len(which), 1)
        for k, features in enumerate(which):
            changed[k, features] = other[features]
        scale = torch.sqrt(kernel.diag(row[None]) * kernel.diag(changed))
        same = (changed == row).all(1)
        corr = kernel(row[None], changed)[0] / scale.clamp(min=1e-300)
        lost += torch.where(same, torch.zeros_like(corr), 1.0 - corr).numpy()
    return np.clip(lost / n_rows, 0.0, 2.0)
