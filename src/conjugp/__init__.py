"""conjugp: calibrated multi-class Gaussian process classification."""

from typing import TYPE_CHECKING, Any

from conjugp import kernels, likelihoods, metrics
from conjugp._estimators.classifier import GPClassifier
from conjugp._fit.options import FitOptions
from conjugp._persistence.model_file import load

if TYPE_CHECKING:
    from conjugp._estimators.gibbs_classifier import GibbsGPClassifier as GibbsGPClassifier

__version__ = "0.1.0"

# Without GibbsGPClassifier: `from conjugp import *` has to work where the sampler cannot.
__all__ = [
    "FitOptions",
    "GPClassifier",
    "__version__",
    "kernels",
    "likelihoods",
    "load",
    "metrics",
]


def __getattr__(name: str) -> Any:
    """Load the sampler, which needs more packages, when it is asked for."""
    if name != "GibbsGPClassifier":
        raise AttributeError(f"module 'conjugp' has no attribute {name!r}")
    try:
        from conjugp._estimators.gibbs_classifier import GibbsGPClassifier
    except ModuleNotFoundError as error:
        raise ImportError(
            f'GibbsGPClassifier needs {error.name}: pip install "conjugp[gibbs]"'
        ) from error
    return GibbsGPClassifier
