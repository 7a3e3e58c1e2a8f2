"""Which output of a network each label of a dataset is: the one home of that question.

A label has a name (a class folder, a column of a CSV, the dataset's own list). It is looked for among the names that
the network has for its outputs, then among ImageNet's WordNet ids, then read as an output's number. Where a network
has no names for its outputs, as many names go in their order, as they did in training.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from timm.data import ImageNetInfo, infer_imagenet_subset

from normswap.errors import SourceError, counted
from normswap.models.weight_files import some

_REMEDY = "Name the folders as the network names its classes, or give a CSV of files and labels"


@dataclass(frozen=True)
class Outputs:
    """How many outputs a network has, and the names of all, in order; None and empty where it does not say."""

    count: int | None = None
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Outputs:
        """Read a network's record (`datasets.image_record`)."""
        names = record.get("label_names") or []
        return cls(record.get("num_classes"), tuple(map(str, names.values() if isinstance(names, Mapping) else names)))


def label_map(
    labels: Mapping[str, int], outputs: Outputs, origin: str, *, needed: bool = True
) -> tuple[dict[int, int], str]:
    """The network's output for each number of a label, and a note on how that was found, where it should be known.

    Where labels are not needed and mean nothing, the output is -1.

    Args:
        labels: the dataset's number of a label, by its name.
        origin: what the user named, for errors.

    Raises:
        SourceError: some names are the network's and others are not, or nothing says which output a label is.
    """
    flat = set(labels) == {""}
    if outputs.count == 0 or (flat and not (needed and outputs.count == 1)):
        what, why = f"{origin} has no class folders", "labels are needed"
        if outputs.count == 0:
            what, why = "the network has no classifier", "features have no accuracy"
        if needed:
            raise SourceError(what, why, _REMEDY)
        return dict.fromkeys(labels.values(), -1), f"{what}: accuracy is not known"
    for way, output_of in _ways(labels, outputs).items():
        output_of_label = {label: output_of.get(label) for label in labels}
        strange = [label for label, output in output_of_label.items() if output is None]
        if len(strange) == len(labels):
            continue
        if strange:
            names = some(label or "(images outside of the class folders)" for label in strange)
            what = f"{origin}: {len(strange)} of {len(labels)} labels are no classes of the network ({names})"
            raise SourceError(what, f"its classes are {some(outputs.names)}" if outputs.names else "", _REMEDY)
        output_of_number = {labels[label]: output for label, output in output_of_label.items() if output is not None}
        largest = max(output_of_number.values())
        if outputs.count is not None and largest >= outputs.count:
            what = f"{origin} has a label {largest}"
            raise SourceError(what, f"the network's outputs are 0 to {outputs.count - 1}", _REMEDY)
        few = outputs.count is not None and len(labels) < outputs.count
        note = f"labels by {way}: {len(labels)} of the network's {outputs.count} classes" if few else ""
        return output_of_number, note
    if outputs.names or outputs.count not in (None, len(labels)):
        what = f"{origin} has {counted(len(labels), 'class', 'classes')} ({some(sorted(labels))})"
        why = f"the network has {outputs.count}" + (f" ({some(outputs.names)})" if outputs.names else "")
        raise SourceError(what, why, _REMEDY)
    return {number: number for number in labels.values()}, ""


def _ways(labels: Mapping[str, int], outputs: Outputs) -> dict[str, Mapping[str, int]]:
    """The outputs that labels may mean: by name, by WordNet id, by number.

    Names are compared letter for letter, then without regard to case, `_` and `-`; a name that two outputs have is
    none. timm lists the WordNet ids of networks with as many classes as a set of ImageNet's.
    """
    by_name: dict[str, int] = {}
    for names in ([_plain(name) for name in outputs.names], outputs.names):
        by_name |= {name: index for index, name in enumerate(names) if names.count(name) == 1}
    subset = infer_imagenet_subset({"num_classes": outputs.count})
    wordnet_ids = ImageNetInfo(subset).label_names() if subset else []
    return {
        "name": {label: by_name[name] for label in labels for name in (_plain(label), label) if name in by_name},
        "WordNet id": {label: index for index, label in enumerate(wordnet_ids)},
        "number": {label: int(label) for label in labels if label.isdecimal()},
    }


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name).strip().casefold()
