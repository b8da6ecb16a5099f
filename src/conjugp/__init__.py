"""conjugp: calibrated multi-class Gaussian process classification."""

from conjugp import kernels, likelihoods, metrics
from conjugp.classifier import GPClassifier
from conjugp.options import FitOptions

__version__ = "0.1.0"

__all__ = ["FitOptions", "GPClassifier", "__version__", "kernels", "likelihoods", "metrics"]
