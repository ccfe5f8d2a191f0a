"""CIFAR-10 with a pre-trained network, section 5.2 of the paper: `clipwise reproduce cifar10`.

The paper's claims: the noise hardly matters to the loss; the best accuracy lies on a diagonal of small R and large
learning rates; a large R is better calibrated than a small one, at equal privacy and with little loss of accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from papers.cifar10 import grid
from papers.cifar10.features import cached
from papers.cifar10.networks import called, extractor
from papers.cifar10.page import write
from papers.cifar10.study import DEFAULT, FOLDER, SEEDS, SIDE, TUNED, cells, head_settings, study
from papers.study import complete, parser_of, placed, told


@told()
def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, then write the page."""
    parser = parser_of("cifar10", SEEDS)
    parser.add_argument(
        "--network",
        default=None,
        help=f"{DEFAULT} (default, runs everywhere), vit_base (the paper's; from the model hub), or a folder with a "
        "vision transformer; anything except the default has a separate page",
    )
    parser.add_argument(
        "--whole",
        action="store_true",
        help="fine-tune on all 50,000 images in full resolution with batches of 1,000, as the paper does: many hours "
        "without a GPU",
    )
    args = parser.parse_args(arguments)
    network = args.network or ("tiny" if args.quick else DEFAULT)
    home = FOLDER if network == DEFAULT and not args.whole else FOLDER / (called(network) + "-whole" * args.whole)
    if args.quick:
        print(
            f"Quick form: {network} on synthetic images, a few steps. It shows that everything runs; no number counts."
        )
    planned = study(network, args.quick, args.whole)
    if not (args.quick or args.draw or (args.only and all(TUNED in name for name in args.only))):
        cached(network, extractor(network, SIDE if network == DEFAULT else None))  # before any run needs them
    with placed(replace(planned, folder=home), () if args.quick else None) as here:
        arms = complete(here, args)
        wanted = [] if args.draw or args.only else cells(args.quick, args.seeds)
        settings = head_settings(network, args.quick)
        rows = grid.complete(wanted, here.folder / "grid.json", FOLDER / "config.toml", settings, args.jobs)
        print(write(arms, rows, here.folder, network, args.whole))


if __name__ == "__main__":
    main()
