"""SNLI with the last layer of a BERT and mix-up training, section 5.4: `clipwise reproduce snli`.

The paper's claim: a small R throughout does not lower the loss at all, though accuracy grows; 95 % of the steps with
the small R and the rest with a large one is nearly as accurate and better calibrated, at the same privacy.

`--weights bert_base` (from the model hub) or a folder with a BERT takes all available pairs, as the paper does;
without it, MiniLM and 99,890 pairs are used, which are available everywhere.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from clipwise.experiments import Arm, Study
from papers.snli.bert import write_tiny_bert
from papers.snli.frozen import Choice, hidden
from papers.snli.page import LARGE, MIX_UP, NOT_PRIVATE, SMALL, write
from papers.study import complete, parser_of, placed, told

HERE = Path(__file__).parent
EVERYWHERE = Choice("minilm", records=99_890)
STUDY = Study.beside(
    __file__,
    arms=(
        Arm(SMALL),
        Arm(
            MIX_UP,
            ('clip={schedule="MixUp",switch_at=0.95,small={rule="Abadi",R=0.1},large={rule="Abadi",R=20.0}}',),
        ),
        Arm(LARGE, ("clip.R=20.0",)),
        Arm(NOT_PRIVATE, ("privacy={private=false}", "clip={rule='NoClip'}")),
    ),
    seeds=2,
)
QUICK = ("epochs=4.0", "evaluation.every=5", "evaluation.resamples=0")


def with_states(choice: Choice, records: int) -> Study:
    """The study on other hidden states, measured as often over its steps as with those of the configuration."""
    options = ", ".join(f"{name} = {json.dumps(value)}" for name, value in asdict(choice).items() if value is not None)
    every = max(1, records * 170 // 99_890)
    settings = (f"data.options={{{options}}}", f"model.options={{{options}}}", f"evaluation.every={every}")
    arms = tuple(replace(arm, overrides=(*arm.overrides, *settings)) for arm in STUDY.arms)
    return replace(STUDY, folder=HERE / Path(choice.weights).resolve().name, arms=arms)


@contextmanager
def scaled_down(quick: bool) -> Iterator[Choice | None]:
    """For `--quick`: a BERT of random weights, and a data folder that is gone afterwards."""
    if not quick:
        yield None
        return
    before = os.environ.get("CLIPWISE_DATA")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["CLIPWISE_DATA"] = str(Path(scratch, "data"))
        try:
            yield Choice(str(write_tiny_bert(Path(scratch, "tiny-bert"))), text="synthetic")
        finally:
            del os.environ["CLIPWISE_DATA"]
            if before is not None:
                os.environ["CLIPWISE_DATA"] = before


def _prepare(choice: Choice) -> int:
    """Compute the hidden states before any run needs them; the number of training pairs."""
    found = hidden(choice)
    records = len(found.places["train"])
    print(f"{records:,} training pairs. {found.data().note}", flush=True)
    return records


@told()
def main(arguments: Sequence[str] | None = None) -> None:
    """Compute the hidden states, train what is missing, write tables and figures."""
    parser = parser_of("snli", STUDY.seeds)
    parser.add_argument("--weights", metavar="NAME|FOLDER", help="a BERT other than MiniLM, on all the pairs")
    parser.add_argument("--states", action="store_true", help="compute the hidden states only")
    args = parser.parse_args(arguments)
    with scaled_down(args.quick) as tiny:
        choice = tiny or (Choice(str(args.weights)) if args.weights else EVERYWHERE)
        records = 0 if args.draw else _prepare(choice)
        if args.states:
            return
        study = STUDY if choice == EVERYWHERE else with_states(choice, records)
        with placed(study, QUICK if args.quick else None) as here:
            print(write(complete(here, args), here.folder, args.weights))


if __name__ == "__main__":
    main()
