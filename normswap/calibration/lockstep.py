"""Two networks marching over the same images, side by side, from one layer to the next.

Where a block begins the one value that later nodes still read is kept, per batch, in files of a temporary folder, and
each stop goes on from there: little is computed or written twice, and memory does not grow with the images.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from normswap.calibration.checked_batches import checked, misfit
from normswap.errors import SourceError, TraceError, VerificationError
from normswap.graph.recording import record, record_once
from normswap.graph.tracing import Traced, apply
from normswap.models.calling import Example

Values = dict[str, Any]
MIRRORED = 1000  # so many images are shown in a mirror, too; more are enough by themselves
SIZE = ""  # the name, among values, of the record that the images follow
FAR = 48  # nodes that are computed anew at each stop, at most


class Walker:
    """One network, run from node to node: for each size of its input there is a record of its own, and for each input
    where the network looks at values.
    """

    def __init__(self, model: nn.Module, example: Example) -> None:
        """`example`: a first batch of what it will be run on."""
        # how many images a list has decides the way
        self.traced = record_once(model, example) if example.listed else record(model, example.first(2))
        self.nodes = self.traced.nodes
        self.records: dict[str, Traced] = {}
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self.last: dict[fx.Node, int] = {}  # the last node that reads each value
        for i, node in enumerate(self.nodes):
            self.last.update(dict.fromkeys(node.all_input_nodes, i))

    def start(self, example: Example) -> Values:
        """The values before the first node: what it takes in the place of its inputs, and which record it follows.

        Raises:
            SourceError: on images of this size the network takes another way.
        """
        key = f"{len(self.records)}: {example}" if self.traced.branches else str(example)
        if key not in self.records:
            own = record_once(self.traced.modules[""], example)
            if [(node.name, str(node.target)) for node in own.nodes] != [(n.name, str(n.target)) for n in self.nodes]:
                why = "the way depends on how many there are, too" if example.listed else ""
                raise SourceError(f"images of size {example} take another way through the network", why)
            self.records[key] = own
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
        alive = (n.name for n in self.nodes[:end] if n.name in values and self.last.get(n, -1) >= end)
        return {SIZE: values[SIZE], **{name: values[name] for name in alive}}

    def alive(self, end: int) -> int:
        """How many values are still read at the node `end` or after it."""
        return sum(self.last.get(node, -1) >= end for node in self.nodes[:end])

    def _compute(self, record: Traced, node: fx.Node, values: Values) -> Any:
        if node.op == "get_attr":
            return record.fetch(str(node.target))
        args = fx.node.map_arg(node.args, lambda n: values[n.name])
        kwargs = fx.node.map_arg(node.kwargs, lambda n: values[n.name])
        return apply(record, node, args, kwargs)


def walkers(batches: Iterable[Any], *models: nn.Module) -> tuple[list[Walker], Iterable[Example]]:
    """A walker for each network, recorded on the first of the batches, and all the batches again, as calls.

    Args:
        batches: what the networks take (`Example.read`).

    Raises:
        SourceError: there is none, or the images do not fit the networks.
    """
    rest = checked(models[0], batches)
    first = next(rest, None)
    if first is None:
        raise SourceError("0 calibration images", "at least 2 are needed")
    try:
        found = [Walker(model, first) for model in models]
    except TraceError as error:
        raise SourceError("the calibration images do not fit the network", error.why or error.what) from None
    return found, itertools.chain([first], rest)


class March:
    """The stored batches and how far each network has come on them.

    Args:
        walkers: the networks, in eval mode.
        batches: calls, on the networks' device; read once.
        mirror: take every image's mirror image, too, if there are no more than `MIRRORED`.
        needed: fewer images than this are an error.

    Raises:
        SourceError: the batches are unusable, or too few.
    """

    def __init__(
        self, walkers: list[Walker], batches: Iterable[Example], *, mirror: bool = False, needed: int = 2
    ) -> None:
        self.walkers, self.folder = walkers, tempfile.TemporaryDirectory(prefix="normswap-")
        self.files: list[str] = []
        self.images = 0
        self.reached = [0] * len(walkers)
        try:
            self._store(batches, mirror)
            if self.images < needed:
                raise SourceError(f"{self.images} calibration images", f"at least {needed} are needed")
        except BaseException:
            self.close()
            raise

    def _store(self, batches: Iterable[Example], mirror: bool) -> None:
        forms: dict[str, Example] = {}
        for i, example in enumerate(batches):
            if not i:
                self._probe(example.first(1))
            mirror = mirror and example.mirrors
            self.images += example.count
            self.files.append(f"{i}")
            forms[self.files[-1]] = example.hollow
            self._save(self.files[-1], [walker.start(example) for walker in self.walkers])
        if mirror and self.images <= MIRRORED:
            self.files = [name for file in self.files for name in (file, self._mirrored(file, forms[file]))]

    def _mirrored(self, file: str, form: Example) -> str:
        images = (value.flip(-1) for value in self._load(file)[0].values() if isinstance(value, Tensor))
        example = form.map(lambda _: next(images))
        self._save(f"{file}-mirrored", [walker.start(example) for walker in self.walkers])
        return f"{file}-mirrored"

    @torch.no_grad()
    def _probe(self, example: Example) -> None:
        for walker in self.walkers:
            try:
                example.call(walker.traced.modules[""])
            except Exception as error:  # whatever the network raises
                raise misfit(error) from None

    def close(self) -> None:
        self.folder.cleanup()

    def _file(self, name: str) -> Path:
        return Path(self.folder.name) / f"{name}.pt"

    def _save(self, name: str, values: Any) -> None:
        torch.save(values, self._file(name))

    def _load(self, name: str) -> Any:
        return torch.load(self._file(name), weights_only=False)

    @torch.no_grad()
    def stop(self, nodes: list[fx.Node]) -> Iterator[list[Values]]:
        """Go on to the given node of each network, which is not run yet; gives each batch's values there."""
        ends = [walker.index[node] for walker, node in zip(self.walkers, nodes, strict=True)]
        way = max(end - begin for begin, end in zip(self.reached, ends, strict=True))
        keep = way > FAR or all(w.alive(end) == 1 for w, end in zip(self.walkers, ends, strict=True))
        for file in self.files:
            values = self._load(file)
            try:
                values = [w.run(v, b, e) for w, v, b, e in zip(self.walkers, values, self.reached, ends, strict=True)]
            except Exception as error:  # a way that only other images take
                raise misfit(error, "these images take another way through the network than the first") from None
            if any(isinstance(t, Tensor) and t.is_floating_point() and not torch.isfinite(t).all()
                   for held in values for t in held.values()):  # fmt: skip
                raise VerificationError("the network gives values that are not finite on the calibration images")
            if keep and way:
                self._save(file, values)
            yield values
        if keep:
            self.reached = ends

    def spool(self, index: int, rows: tuple[Tensor, ...]) -> None:
        """Put what was drawn from a stop's batch beside the batches, in the place of the last stop's."""
        self._save(f"spooled-{index}", rows)

    def unspool(self) -> Iterator[tuple[Tensor, ...]]:
        """What was put there, batch by batch."""
        for index in range(len(self.files)):
            yield self._load(f"spooled-{index}")
