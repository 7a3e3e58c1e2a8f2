"""Two networks run over the same images, in lockstep, from one layer to the next.

Where they stop, the values that later nodes still read are kept, per batch, in files of a temporary folder, and the
next stop goes on from there: little is computed or written twice, and memory does not grow with the images.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from normswap.calibration.activation_cache import ActivationCache, CacheEntry, TensorFiles, Values
from normswap.calibration.checked_batches import checked, misfit, parts
from normswap.errors import SourceError, TraceError, VerificationError
from normswap.graph.recording import record, record_once
from normswap.graph.tracing import Traced, apply
from normswap.models.calling import Example

MIRRORED = 500  # so many images are shown in a mirror, too; to more it adds nothing
SIZE = ""  # the name, among values, of the record that the images follow


class Interpreter:
    """One network, run from node to node.

    For each size of its input there is a record of its own, and for each input where the network looks at values.
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
    """A node's arguments with the values of the nodes among them; lists are new, as they may be written to."""
    if isinstance(value, fx.Node):
        return values[value.name]
    if isinstance(value, dict):
        return {key: _filled(part, values) for key, part in value.items()}
    if isinstance(value, list):
        return [_filled(part, values) for part in value]
    if isinstance(value, slice):
        return slice(*(_filled(part, values) for part in (value.start, value.stop, value.step)))
    if isinstance(value, tuple):
        parts = [_filled(part, values) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def interpreters(batches: Iterable[object], *models: nn.Module) -> tuple[list[Interpreter], Iterable[Example]]:
    """An interpreter for each network, recorded on the first of the batches, and all the batches again, as calls.

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
        recorded = [Interpreter(model, first) for model in models]
    except TraceError as error:
        raise SourceError("the calibration images do not fit the network", error.why or error.what) from None
    return recorded, itertools.chain([first], rest)


class Lockstep:
    """The stored batches and how far each network has come on them.

    Args:
        interpreters: the networks, in eval mode.
        batches: calls, on the networks' device; read once.
        mirror: take every image's mirror image, too, if there are no more than `MIRRORED`.
        needed: fewer images than this are an error.

    Raises:
        SourceError: the batches are unusable, or too few.
    """

    def __init__(
        self, interpreters: list[Interpreter], batches: Iterable[Example], *, mirror: bool = False, needed: int = 2
    ) -> None:
        self.interpreters, self.store = interpreters, TensorFiles()
        self.batches: list[list[dict[str, CacheEntry]]] = []  # where the values of each interpreter lie, batch by batch
        self.images = 0
        self.shown = 0  # with the mirror images
        self.reached = [0] * len(interpreters)
        try:
            self._store(batches, mirror)
            if self.images < needed:
                raise SourceError(f"{self.images} calibration images", f"at least {needed} are needed")
        except BaseException:
            self.close()
            raise

    def _store(self, batches: Iterable[Example], mirror: bool) -> None:
        forms: list[Example] = []
        for i, example in enumerate(part for batch in batches for part in parts(batch, batch.images.device)):
            if not i:
                self._probe(example.first(1))
            mirror = mirror and example.mirrors
            self.images += example.count
            forms.append(example.hollow)
            self._begin(example)
        if mirror and self.images <= MIRRORED:
            straight, self.batches = self.batches, []
            for entries, form in zip(straight, forms, strict=True):
                self.batches.append(entries)
                self._mirror(entries, form)

    def _mirror(self, entries: list[dict[str, CacheEntry]], form: Example) -> None:
        images = (
            value.flip(-1) for value in ActivationCache(self.store, entries[0]).values() if isinstance(value, Tensor)
        )
        self._begin(form.map(lambda _: next(images)))

    def _begin(self, example: Example) -> None:
        self.shown += example.count
        caches = [ActivationCache(self.store, {}) for _ in self.interpreters]
        for interpreter, cache in zip(self.interpreters, caches, strict=True):
            cache.update(interpreter.start(example))
        self.batches.append([cache.keep({}) for cache in caches])

    @torch.no_grad()
    def _probe(self, example: Example) -> None:
        for interpreter in self.interpreters:
            try:
                example.call(interpreter.traced.modules[""])
            except Exception as error:  # whatever the network raises
                raise misfit(error) from None

    def close(self) -> None:
        self.store.close()

    @torch.no_grad()
    def run_to(self, nodes: list[fx.Node]) -> Iterator[list[Values]]:
        """Go on to the given node of each network, which is not run yet; gives each batch's values there.

        Who computes the value of such a node may leave it among them.

        Raises:
            VerificationError: after the last batch: a value of any of them is not finite.
        """
        ends = [interpreter.index[node] for interpreter, node in zip(self.interpreters, nodes, strict=True)]
        keep = all(end >= begin for begin, end in zip(self.reached, ends, strict=True))
        finite: list[Tensor] = []
        for i, entries in enumerate(self.batches):
            caches = [ActivationCache(self.store, slots) for slots in entries]
            try:
                for interpreter, cache, begin, end in zip(self.interpreters, caches, self.reached, ends, strict=True):
                    interpreter.run(cache, begin, end)
            except Exception as error:  # a way that only other images take
                raise misfit(error, "these images take another way through the network than the first") from None
            for slots, cache in zip(entries, caches, strict=True):
                finite += _finite(cache.held[name] for name in cache.held.keys() - slots.keys())
            yield [*caches]
            if keep:
                self.batches[i] = [cache.keep(slots) for slots, cache in zip(entries, caches, strict=True)]
        if finite and not bool(torch.stack(finite).all()):  # asked once for all batches: a device is waited for
            raise VerificationError("the network gives values that are not finite on the calibration images")
        if keep:
            self.reached = ends


def _finite(values: Iterable[object]) -> Iterator[Tensor]:
    """Of each tensor of numbers whether all of them are finite, as a bool () on its device."""
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            least, most = value.aminmax()
            yield least.isfinite() & most.isfinite()
