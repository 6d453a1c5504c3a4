"""GLUE's metrics over a whole validation set, by scikit-learn and SciPy."""

from collections.abc import Callable

import numpy as np

Metric = Callable[[np.ndarray, np.ndarray], float]
"""Of labels and predictions, both [N]."""


def accuracy(labels: np.ndarray, predictions: np.ndarray) -> float:
    """The share of correct predictions."""
    return float((labels == predictions).mean())


def f1(labels: np.ndarray, predictions: np.ndarray) -> float:
    """The harmonic mean of precision and recall of class 1; 0 where there is no such class."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, zero_division=0))


def mcc(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Matthews' correlation coefficient; 0 where all predictions are equal."""
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels, predictions))


def pearson(labels: np.ndarray, predictions: np.ndarray) -> float:
    """The linear correlation; 0 where all predictions or all labels are equal."""
    from scipy.stats import pearsonr

    return float(pearsonr(labels, predictions)[0]) if _vary(labels, predictions) else 0.0


def spearman(labels: np.ndarray, predictions: np.ndarray) -> float:
    """The correlation of ranks; 0 where all predictions or all labels are equal."""
    from scipy.stats import spearmanr

    return float(spearmanr(labels, predictions)[0]) if _vary(labels, predictions) else 0.0


def _vary(*values: np.ndarray) -> bool:
    return all(bool((column != column[0]).any()) for column in values)


METRICS: dict[str, Metric] = {
    metric.__name__: metric for metric in (accuracy, f1, mcc, pearson, spearman)
}
