"""Small sets stay quick: `fit` with the kernel learned, against scikit-learn's exact GP.

python bench/small.py
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

from record import add_output, context, keep

REPEATS = 5


def seconds(model: Any, X: Any, y: Any) -> float:
    """How long one fit takes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        began = time.perf_counter()
        model.fit(X, y)
        return time.perf_counter() - began


def run(X: Any, y: Any, repeats: int) -> dict[str, Any]:
    """Fits of both in turn, so that whatever else the machine does meets both alike."""
    from sklearn.gaussian_process import GaussianProcessClassifier
    from sklearn.gaussian_process.kernels import RBF

    from conjugp import GPClassifier

    times: dict[str, list[float]] = {"conjugp": [], "scikit-learn": []}
    for _ in range(repeats):
        times["conjugp"].append(seconds(GPClassifier(random_state=0), X, y))
        peer = GaussianProcessClassifier(1.0 * RBF(), random_state=0)
        times["scikit-learn"].append(seconds(peer, X, y))
    median = {name: statistics.median(found) for name, found in times.items()}
    ratio = median["scikit-learn"] / median["conjugp"]
    return {"seconds": times, "median": median, "ratio": ratio, "passed": ratio >= 1}


def main() -> None:
    from sklearn.datasets import load_iris, load_wine
    from sklearn.preprocessing import StandardScaler

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=REPEATS)
    add_output(parser, "small.json")
    arguments = parser.parse_args()
    print("| set | scikit-learn s | conjugp s | ratio | |\n|---|--:|--:|--:|---|")
    for name, loader in (("wine", load_wine), ("iris", load_iris)):
        X, y = loader(return_X_y=True)
        for inputs, A in (("raw", X), ("standardised", StandardScaler().fit_transform(X))):
            label = f"{name}, {inputs}"
            result = run(A, y, arguments.repeats)
            keep(arguments.output, label, {**context(), **result})
            m = result["median"]
            print(
                f"| {label} | {m['scikit-learn']:.3f} | {m['conjugp']:.3f} | {result['ratio']:.2f} "
                f"| {'pass' if result['passed'] else 'FAIL'} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
