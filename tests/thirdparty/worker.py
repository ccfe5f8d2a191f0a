"""The process that measures rows of one family, one JSON line each. The parent ends it when a row takes too long."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from typing import Any

import torch

from .measure import measure, say
from .row import rows


def main(family: str, names: list[str]) -> None:
    """Measure the named rows in order."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print goes elsewhere
    torch.set_num_threads(1)
    load_torchvision()
    by_name = {row.name: row for row in rows(family)}
    for name in names:
        row = by_name[name]
        if importlib.util.find_spec(row.package) is None:
            result: dict[str, Any] = {"package": row.package, "status": "skipped", "message": "package not installed"}
        else:
            try:
                result = measure(row)
            except Exception as error:
                result = {"package": row.package, "status": "broken row", "message": say(error)}
        out.write(json.dumps({"name": name} | result) + "\n")
        out.flush()


def load_torchvision() -> None:
    """Import torchvision even where its compiled operators do not fit a CPU build of torch: no model here uses them."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision
    except RuntimeError:
        for module in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[module]
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        KEPT.append(library)
        import torchvision  # noqa: F401


KEPT: list[Any] = []

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
