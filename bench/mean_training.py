"""What training the mean at zero latent variance buys: "map" against "elbo".

python bench/mean_training.py [set ...]
"""

from __future__ import annotations

import argparse

from data import load
from record import scores

from conjugp import FitOptions, GPClassifier

SETS = ("letter", "shuttle", "mnist")


def main() -> None:
    """Print error and NLL of both, set by set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", nargs="*", metavar="set", help="data sets")
    for name in parser.parse_args().sets or SETS:
        split = load(name)
        for training in ("map", "elbo"):
            model = GPClassifier(random_state=0, options=FitOptions(mean_training=training))
            model.fit(split.X_train, split.y_train)
            found = scores(split.y_test, model.predict_proba(split.X_test), model.classes_)
            print(f"{name} {training}: error {found['error']:.4f}, NLL {found['nll']:.4f}")


if __name__ == "__main__":
    main()
