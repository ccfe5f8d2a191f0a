"""The title and the caption of each figure of a page, for a reader who has never seen one like it."""

from __future__ import annotations

__all__ = ["CAPTIONS", "kind_of"]

CAPTIONS = {
    "reliability": (
        "When it says it is sure, is it right?",
        "Each line is a group of predictions made with similar confidence; its height is the share of them that was "
        "right. On the dotted diagonal confidence and accuracy agree; with the line below it, the model is "
        "over-confident. The narrow bars are the gap between the two, strong where it is more than chance: where the "
        "confidence is outside the band, the 95 % interval of the accuracy. The small panel shows where the "
        "predictions are.",
    ),
    "confidence": (
        "How sure is it?",
        "The share of predictions by confidence, on a logarithmic scale. Where the dashed line (mean confidence) is to "
        "the right of the solid one (accuracy), the model is over-confident on the whole.",
    ),
    "true-class": (
        "What probability did the truth get?",
        "The share of samples by the probability that the model gave to their true class, on a logarithmic scale. What "
        "piles up at the left end was sure and wrong.",
    ),
    "coverage": (
        "Do the intervals hold the truth?",
        "The share of true values inside the model's intervals, against the share that the intervals promise. On the "
        "diagonal they agree; below it the intervals are too narrow.",
    ),
    "clipping-norm": (
        "What the clipping norm R does",
        "Whiskers are 95 % intervals; a dashed level is a model without a single R. In the right panel the best corner "
        "is the upper left: accurate and calibrated.",
    ),
    "heat-map": (
        "Clipping norm and learning rate",
        "Means over the seeds, in per cent where the metric is a share; yellow cells are better.",
    ),
    "training": (
        "Over training",
        "Measured on held-out data during training: mean over the seeds, with one standard deviation to both sides.",
    ),
    "privacy": (
        "What the privacy is worth",
        "Left: the pairs of epsilon and delta that hold together; the level is the delta of this page. Right: the most "
        "that an attacker who knows all records (in federated training, all users) but one can find out about that "
        "one, for each rate of false alarms.",
    ),
    "private-training": (
        "Inside private training",
        "Exact statistics of the private training samples at each step: mean over the seeds, with one standard "
        "deviation to both sides.",
    ),
}


def kind_of(name: str) -> str:
    """The figure's kind, where a page has several of it.

    >>> kind_of("privacy-2"), kind_of("heat-map")
    ('privacy', 'heat-map')
    """
    return name.rstrip("-0123456789")
