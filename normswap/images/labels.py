"""Which output of a network each label of a dataset is: the one home of that question.

A label has a name (a class folder, a column of a CSV, the dataset's own list). It is looked for among the names that
the network has for its outputs, then among ImageNet's WordNet ids, then taken as a number; only where none of these
says anything, the order of the names is taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from timm.data import ImageNetInfo, infer_imagenet_subset

from normswap.errors import SourceError, counted
from normswap.models.building import near
from normswap.models.weight_files import some

_WORDNET = re.compile(r"n\d{8}")
_WHOLE = re.compile(r"-?\d+")
_SHOWN = 10
_REMEDY = "Name the folders as the network names its classes, or give a CSV of files and labels"


@dataclass(frozen=True)
class Outputs:
    """The outputs of a network, as far as it says what they are.

    Args:
        count: how many there are; None where that is not known.
        names: of all of them, in order; empty where there are none.
    """

    count: int | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class LabelMap:
    """The output of each label.

    Args:
        outputs: by the dataset's number of a label.
        note: how that was found, where the user should know; else empty.
    """

    outputs: Mapping[int, int]
    note: str = ""


def label_map(labels: Mapping[str, int], outputs: Outputs, origin: str) -> LabelMap:
    """The network's output for every label of a dataset.

    Args:
        labels: the dataset's number of a label, by its name.
        origin: what the user named, for errors.

    Raises:
        SourceError: some names are the network's and others are not, or nothing says which output a label is.
    """
    if set(labels) == {""} and outputs.count != 1:
        why = "labels are needed" if outputs.count is None else f"the network has {outputs.count}"
        remedy = "Every class is a folder of images, or give a CSV of files and labels"
        raise SourceError(f"{origin} has no class folders", why, remedy)
    if outputs.count == 0:
        remedy = "`normswap verify` compares its features with those of its source"
        raise SourceError("the network has no classifier", "features have no accuracy", remedy)
    for way, output_of in (("name", _by_name(outputs)), ("WordNet id", _by_wordnet(labels, outputs))):
        outputs_of_labels = {label: output_of.get(label, output_of.get(_plain(label))) for label in labels}
        strange = [label for label, output in outputs_of_labels.items() if output is None]
        if output_of and len(strange) < len(labels):
            if strange:
                raise _partly_known(strange, labels, outputs, origin)
            chosen = {labels[label]: output for label, output in outputs_of_labels.items() if output is not None}
            return LabelMap(chosen, _few(labels, outputs, way))
    if all(_WHOLE.fullmatch(label) for label in labels):
        return _by_number(labels, outputs, origin)
    return _by_order(labels, outputs, origin)


def no_labels(labels: Mapping[str, int], outputs: Outputs) -> LabelMap:
    """No output for any label: -1."""
    why = "the network has no classifier" if outputs.count == 0 else "no class folders"
    what = "features are" if outputs.count == 0 else "answers are"
    return LabelMap(dict.fromkeys(labels.values(), -1), f"{why}: {what} compared, accuracy is not known")


def _by_name(outputs: Outputs) -> dict[str, int]:
    """The network's own names, letter for letter and without regard to case, `_` and `-`; not those that two have."""
    output_of: dict[str, int] = {}
    for spelled in (_plain, str):
        names = [spelled(name) for name in outputs.names]
        output_of |= {name: index for index, name in enumerate(names) if names.count(name) == 1}
    return output_of


def _by_wordnet(labels: Mapping[str, int], outputs: Outputs) -> dict[str, int]:
    """timm's list of the WordNet ids of a network with as many classes as a set of ImageNet's."""
    subset = infer_imagenet_subset({"num_classes": outputs.count})
    if subset is None or not any(_WORDNET.fullmatch(label) for label in labels):
        return {}
    return {wordnet: index for index, wordnet in enumerate(ImageNetInfo(subset).label_names())}


def _partly_known(strange: list[str], labels: Mapping[str, int], outputs: Outputs, origin: str) -> SourceError:
    unknown = strange[0] or "(images outside of the class folders)"
    what = f"{origin}: {len(strange)} of {len(labels)} labels are no classes of the network ({some(strange)})"
    why = near(unknown, outputs.names, f"its classes are {some(outputs.names)}") if outputs.names else ""
    return SourceError(what, why.rstrip("?."), _REMEDY)


def _by_number(labels: Mapping[str, int], outputs: Outputs, origin: str) -> LabelMap:
    """The number that a label's name is, where all are different numbers of outputs."""
    numbers = [int(label) for label in labels]
    first, last = min(numbers), max(numbers)
    if first < 0 or len(set(numbers)) < len(labels) or (outputs.count is not None and last >= outputs.count):
        known = "" if outputs.count is None else f"the network's outputs are 0 to {outputs.count - 1}"
        raise SourceError(f"{origin} has labels from {first} to {last}", known, "Number them so, or name the classes")
    chosen = {number: int(label) for label, number in labels.items()}
    return LabelMap(chosen, _few(labels, outputs, "number"))


def _by_order(labels: Mapping[str, int], outputs: Outputs, origin: str) -> LabelMap:
    if outputs.count is not None and len(labels) != outputs.count:
        what = f"{origin} has {counted(len(labels), 'class', 'classes')} ({some(sorted(labels))})"
        raise SourceError(what, f"the network has {outputs.count}", "Every class is a folder of images.")
    chosen = {number: number for number in labels.values()}
    if not outputs.names:
        return LabelMap(chosen)
    ordered = sorted(labels.items(), key=lambda pair: pair[1])
    shown = ", ".join(f"{label} -> {outputs.names[number]}" for label, number in ordered[:_SHOWN])
    more = f", and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return LabelMap(chosen, f"no label is a name of the network's classes, so they go in order: {shown}{more}")


def _few(labels: Mapping[str, int], outputs: Outputs, way: str) -> str:
    """A note where classes are missing."""
    if outputs.count is None or len(labels) >= outputs.count:
        return ""
    return f"labels by {way}: {len(labels)} of the network's {outputs.count} classes"


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name).strip().casefold()
