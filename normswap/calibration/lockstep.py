"""Several networks run over the same images, in lockstep, from one layer to the next.

Where they stop, the values that later nodes still read are stored batch by batch, and the next stop goes on from there.
"""

from __future__ import annotations

import copy
import itertools
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from normswap.calibration.checked_batches import checked, misfit, parts, run
from normswap.errors import SourceError, TraceError, VerificationError
from normswap.graph.recording import record, record_once
from normswap.graph.tracing import Traced, apply
from normswap.models.calling import Example

Values: TypeAlias = dict[str, Any]
# The name, among values, of the record that the images follow.
SIZE = ""
# Tensors of so many bytes lie in files.
LARGE = 2**20


class Interpreter:
    """One network, run node by node, with a record for each size of its input, or each input where values decide."""

    def __init__(self, model: nn.Module, example: Example) -> None:
        """`example`: a first batch of what it will be run on."""
        # The number of images in a list decides which operations run.
        self.traced = record_once(model, example) if example.listed else record(model, example.first(2))
        self.nodes = self.traced.nodes
        self.records: dict[str, Traced] = {}
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self.last: dict[fx.Node, int] = {}
        for i, node in enumerate(self.nodes):
            self.last.update(dict.fromkeys(node.all_input_nodes, i))

    def start(self, example: Example) -> Values:
        """The values before the first node: what it takes in the place of its inputs, and which record it follows."""
        key = f"{len(self.records)}: {example}" if self.traced.branches else str(example)
        if key not in self.records:
            record = record_once(self.traced.modules[""], example)
            if [(node.name, str(node.target)) for node in record.nodes] != [
                (n.name, str(n.target)) for n in self.nodes
            ]:
                why = "the way depends on how many there are, too" if example.listed else ""
                raise SourceError(f"images of size {example} take another way through the network", why)
            self.records[key] = record
        entries = (node.name for node in self.nodes if node.op == "placeholder")
        return {**dict(zip(entries, example.tensors(), strict=True)), SIZE: key}

    def run(self, values: Values, begin: int, end: int) -> Values:
        """`values` after the nodes from `begin` up to, but not including, `end`; what nobody reads any more is gone."""
        record = self.records[values[SIZE]]
        for i in range(begin, end):
            node = record.nodes[i]
            if node.op == "output":
                break
            if node.name not in values:
                values[node.name] = self._compute(record, node, values)
        alive = {node.name for node in self.nodes[:end] if self.last.get(node, -1) >= end}
        for name in values.keys() - alive - {SIZE}:
            del values[name]
        return values

    def _compute(self, record: Traced, node: fx.Node, values: Values) -> object:
        if node.op == "get_attr":
            return record.fetch(str(node.target))
        args, kwargs = _filled(node.args, values), _filled(node.kwargs, values)
        return apply(record, node, args, kwargs)


def _filled(value: object, values: Values) -> Any:
    if isinstance(value, fx.Node):
        return values[value.name]
    if isinstance(value, dict):
        return {key: _filled(entry, values) for key, entry in value.items()}
    if isinstance(value, list):
        return [_filled(entry, values) for entry in value]
    if isinstance(value, slice):
        return slice(*(_filled(entry, values) for entry in (value.start, value.stop, value.step)))
    if isinstance(value, tuple):
        entries = [_filled(entry, values) for entry in value]
        if hasattr(value, "_fields"):
            return type(value)(*entries)
        return tuple(entries)
    return value


class Lockstep:
    """Networks, recorded on the first batch, and the values of each batch in each of them, as far as they have come.

    Args:
        models: the networks, in eval mode.
        batches: what they take (`Example.read`); read once.
        mirrored: so many images, the first ones, are followed by their mirror images.

    Raises SourceError: the batches do not fit the networks, or there are fewer than two images.
    """

    @torch.no_grad()
    def __init__(self, models: Sequence[nn.Module], batches: Iterable[object], *, mirrored: int = 0) -> None:
        self.batches: list[list[Values]] = []
        # Images, and rows of the stored batches: mirror images count here.
        self.images = self.rows = 0
        examples = checked(models[0], batches)
        first = next(examples, None)
        if first is None:
            raise SourceError("0 calibration images", "at least 2 are needed")
        self.first = first
        try:
            self.interpreters = [Interpreter(model, first) for model in models]
        except TraceError as error:
            raise SourceError("the calibration images do not fit the network", error.why or error.what) from None
        for model in models:
            run(model, first.first(1).map(torch.clone))
        self.device = first.images.device
        self.reached = [0] * len(models)
        for batch in itertools.chain([first], examples):
            for example in parts(batch, self.device):
                self._store(example)
                if self.images < mirrored and example.mirrors:
                    self._store(example.map(lambda images: images.flip(-1)))
                self.images += example.count
        if self.images < 2:
            raise SourceError(f"{self.images} calibration images", "at least 2 are needed")

    def _store(self, example: Example) -> None:
        self.rows += example.count
        # Each network gets a copy: the first layer may write in place.
        starts = [interpreter.start(example.map(torch.clone)) for interpreter in self.interpreters]
        self.batches.append([_stored(values, {}) for values in starts])

    @torch.no_grad()
    def run_to(self, nodes: list[fx.Node]) -> Iterator[list[Values]]:
        """Go on to the given node of each network, which is not run yet; gives each batch's values there.

        Who computes the value of such a node may leave it among them.

        Raises VerificationError: after the last batch: a value of any of them is not finite.
        """
        ends = [interpreter.index[node] for interpreter, node in zip(self.interpreters, nodes, strict=True)]
        advances = all(end >= begin for begin, end in zip(self.reached, ends, strict=True))
        finite: list[Tensor] = []
        for i, stored in enumerate(self.batches):
            batch = [_loaded(values, self.device) for values in stored]
            if not advances:
                # The next stop starts from the stored values, so this one must not write into them.
                batch = copy.deepcopy(batch)
            try:
                for interpreter, values, begin, end in zip(self.interpreters, batch, self.reached, ends, strict=True):
                    interpreter.run(values, begin, end)
            except Exception as error:
                raise misfit(error, "these images take another way through the network than the first") from None
            for values, before in zip(batch, stored, strict=True):
                finite += _finite(values[name] for name in values.keys() - before.keys())
            yield batch
            if advances:
                self.batches[i] = [_stored(values, before) for values, before in zip(batch, stored, strict=True)]
        # One question for all batches, as a device is waited for.
        if finite and not bool(torch.stack(finite).all()):
            raise VerificationError("the network gives values that are not finite on the calibration images")
        if advances:
            self.reached = ends


def _stored(values: Values, before: Values) -> Values:
    # Views of one memory stay there together, as a network may write into one and read the other.
    sharing = Counter(value.untyped_storage().data_ptr() for value in values.values() if isinstance(value, Tensor))
    stored: Values = {}
    for name, value in values.items():
        stored[name] = before.get(name, value)
        large = isinstance(value, Tensor) and value.nbytes >= LARGE and value.is_contiguous()
        if large and name not in before and sharing[value.untyped_storage().data_ptr()] == 1:
            stored[name] = _mapped(value)
    return stored


def _mapped(value: Tensor) -> Tensor:
    """A copy in a temporary file that is mapped to memory: the system may write it out where memory is short."""
    # On a full disk, writing to a mapped file ends the process.
    if shutil.disk_usage(tempfile.gettempdir()).free < 2 * value.nbytes:
        return value
    with tempfile.NamedTemporaryFile(prefix="normswap-") as file:
        mapped = torch.from_file(file.name, shared=True, size=value.numel(), dtype=value.dtype)
    return mapped.view(value.shape).copy_(value)


def _loaded(values: Values, device: torch.device) -> Values:
    loaded = dict(values)
    for name, value in values.items():
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.untyped_storage().filename is not None:
            loaded[name] = value.to(device)
    return loaded


def _finite(values: Iterable[object]) -> Iterator[Tensor]:
    """Of each tensor of numbers whether all of them are finite, as a bool () on its device."""
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            least, most = value.aminmax()
            yield least.isfinite() & most.isfinite()
