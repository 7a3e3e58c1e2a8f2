"""Which output of a network each label of a dataset is: the one home of that question.

A label has a name (a class folder, a column of a CSV, the dataset's own list). It is looked for among the names that
the network has for its outputs, then among ImageNet's WordNet ids, then as a number; only where none of these says
anything is the order of the names taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

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
        raise SourceError(
            f"{origin} has no class folders", _expected(outputs), "Every class is a folder of images, or "
            "give a CSV of files and labels"
        )  # fmt: skip
    if outputs.count == 0:
        remedy = "`normswap verify` compares its features with those of its source"
        raise SourceError("the network has no classifier", "features have no accuracy", remedy)
    listed = _by_name(labels, outputs, origin) or _by_wordnet(labels, outputs, origin) or _by_number(labels, outputs)
    return listed or _by_order(labels, outputs, origin)


def no_labels(labels: Mapping[str, int], outputs: Outputs) -> LabelMap:
    """No output for any label: -1."""
    why = "the network has no classifier" if outputs.count == 0 else "no class folders"
    what = "features are" if outputs.count == 0 else "answers are"
    return LabelMap(dict.fromkeys(labels.values(), -1), f"{why}: {what} compared, accuracy is not known")


def _expected(outputs: Outputs) -> str:
    return "labels are needed" if outputs.count is None else f"the network has {outputs.count}"


def _by_name(labels: Mapping[str, int], outputs: Outputs, origin: str) -> LabelMap | None:
    """By the network's own names: letter for letter, or else without regard to case, `_` and `-`."""
    exact = {name: index for index, name in enumerate(outputs.names)}
    for spelled in (str, _plain):
        known = {spelled(name): index for name, index in exact.items()}
        if len(known) == len(outputs.names) and all(spelled(label) in known for label in labels):
            chosen = {number: known[spelled(label)] for label, number in labels.items()}
            pairs = (
                [] if spelled is str else [(label, outputs.names[chosen[number]]) for label, number in labels.items()]
            )
            return LabelMap(chosen, f"labels by name: {_shown(pairs)}" if pairs else _part(labels, outputs, "name"))
    plain = {_plain(name) for name in exact}
    strange = [label for label in labels if _plain(label) not in plain]
    if len(strange) < len(labels):
        one = strange[0] or "(images outside of the class folders)"
        raise SourceError(
            f"{origin}: {len(strange)} of {len(labels)} labels are no classes of the network ({some(strange)})",
            near(one, outputs.names, f"its classes are {some(outputs.names)}").rstrip("?."), _REMEDY,
        )  # fmt: skip
    return None


def _by_wordnet(labels: Mapping[str, int], outputs: Outputs, origin: str) -> LabelMap | None:
    """By timm's list of the WordNet ids of a network with as many classes as a set of ImageNet's."""
    subset = infer_imagenet_subset({"num_classes": outputs.count})
    if subset is None or not any(_WORDNET.fullmatch(label) for label in labels):
        return None
    order = {wordnet: index for index, wordnet in enumerate(ImageNetInfo(subset).label_names())}
    strange = [label for label in labels if label not in order]
    if strange:
        raise SourceError(
            f"{origin}: {len(strange)} of {len(labels)} labels are none of the {len(order)} WordNet ids of {subset}",
            some(strange), _REMEDY,
        )  # fmt: skip
    chosen = {number: order[label] for label, number in labels.items()}
    return LabelMap(chosen, _part(labels, outputs, "WordNet id"))


def _by_number(labels: Mapping[str, int], outputs: Outputs) -> LabelMap | None:
    """By the number that a label's name is, where all are numbers of outputs."""
    numbers = [int(label) for label in labels if label.isdecimal()]
    if len(set(numbers)) < len(labels) or (outputs.count is not None and max(numbers) >= outputs.count):
        return None
    chosen = {number: int(label) for label, number in labels.items()}
    return LabelMap(chosen, _part(labels, outputs, "number"))


def _by_order(labels: Mapping[str, int], outputs: Outputs, origin: str) -> LabelMap:
    if outputs.count is not None and len(labels) != outputs.count:
        what = f"{origin} has {counted(len(labels), 'class', 'classes')} ({some(sorted(labels))})"
        raise SourceError(what, f"the network has {outputs.count}", "Every class is a folder of images.")
    chosen = {number: number for number in labels.values()}
    if all(_WHOLE.fullmatch(label) for label in labels):
        return _counted_from_one(labels, chosen, origin)
    if not outputs.names:
        return LabelMap(chosen)
    pairs = [(label, outputs.names[number]) for label, number in sorted(labels.items(), key=lambda pair: pair[1])]
    return LabelMap(chosen, f"no label is a name of the network's classes, so they go in order: {_shown(pairs)}")


def _counted_from_one(labels: Mapping[str, int], chosen: Mapping[int, int], origin: str) -> LabelMap:
    first, last, count = min(map(int, labels)), max(map(int, labels)), len(labels)
    if (first, last) != (1, count):
        what = f"{origin} has labels from {first} to {last}"
        raise SourceError(what, f"the network's outputs are 0 to {count - 1}", "Number them so, or name the classes")
    return LabelMap(chosen, f"labels count from one: 1 to {count} are the network's outputs 0 to {count - 1}")


def _part(labels: Mapping[str, int], outputs: Outputs, way: str) -> str:
    """A note where classes are missing."""
    if outputs.count is None or len(labels) >= outputs.count:
        return ""
    return f"labels by {way}: {len(labels)} of the network's {outputs.count} classes"


def _shown(pairs: Sequence[tuple[str, str]]) -> str:
    more = f", and {len(pairs) - _SHOWN} more" if len(pairs) > _SHOWN else ""
    return ", ".join(f"{label} -> {name}" for label, name in islice(pairs, _SHOWN)) + more


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name).strip().casefold()
