"""Wine Quality with full-batch DP-GD, section 5.5: `clipwise reproduce wine`.

The paper's claim: training with a large R is as good as with a small one, and its loss falls monotonically.
"""

from functools import partial

from clipwise.cli.published import PUBLISHED
from clipwise.experiments import Arm, Study
from papers import regression
from papers.regression import WITHOUT_NOISE
from papers.study import main

STUDY = Study.beside(
    __file__,
    arms=(
        *regression.ladder(2.0, 20.0, 200.0, plain=["optimizer.learning_rate=0.001"]),
        *(Arm(f"R = {R:g}{WITHOUT_NOISE}", (f"clip.R={R}", "privacy={private=false}"), 10) for R in (2.0, 20.0)),
    ),
    seeds=30,
)
QUICK = ("steps=40", "evaluation.every=10")

write = partial(regression.write, "Wine Quality, full batch", PUBLISHED["wine"])

if __name__ == "__main__":
    main(STUDY, QUICK, write)
