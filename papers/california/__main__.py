"""California Housing with DP-Adam, section 5.5: `clipwise reproduce california`.

The paper's claim: training with a large R is as good as with a small one. Adam divides by the size of the gradients,
so the learning rate stays the same for every R.
"""

from functools import partial

from clipwise.cli.published import PUBLISHED
from clipwise.experiments import Study
from papers import regression
from papers.study import main

STUDY = Study.beside(__file__, arms=regression.ladder(1.0, 10.0, 100.0), seeds=30)
QUICK = ("steps=40", "evaluation.every=10")

write = partial(regression.write, "California Housing, DP-Adam", PUBLISHED["california"])

if __name__ == "__main__":
    main(STUDY, QUICK, write)
