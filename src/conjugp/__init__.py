"""conjugp: calibrated multi-class Gaussian process classification."""

from conjugp import kernels, likelihoods, metrics

__version__ = "0.1.0"

__all__ = ["__version__", "kernels", "likelihoods", "metrics"]
