"""The result of `inspect` as records: norms with their roles, residual blocks, and their graph.

Patterns say which modules a conversion may change. A pattern is a dotted path with the wildcards of
`fnmatch`: `*`, `?` and `[...]`, which match dots like any other letter. A pattern names the modules
whose paths it matches, and all modules inside them: `layer3`, `layer3.*.bn1`, `*.downsample`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from torch import Tensor, fx, nn

from normswap.errors import OptionError, near, spelled
from normswap.graph.tracing import LINEAR, Traced
from normswap.layers.placeholders import Chain
from normswap.plan import Body
from normswap.provenance import Provenance
from normswap.sites.affine import output_moments
from normswap.sites.known_norms import Statistics
from normswap.sites.site import Site


@dataclass(frozen=True)
class Norm:
    """One normalization layer. A module that is called several times has one record.

    Args:
        site: The record of what the module is, and how forward reaches it.
        role: `stem` (before the first residual block), `last` (at the end of a branch), `down` (on
            a projection skip), `head` (after the last block) or `other`.
        block: The path of the residual block that the norm belongs to. None outside of blocks.
    """

    site: Site
    role: str
    block: str | None

    @property
    def path(self) -> str:
        """The dotted path of the norm in the network, such as `layer1.0.bn1`."""
        return self.site.path

    @property
    def kind(self) -> str:
        """The name of the norm's class, such as `BatchNorm2d`."""
        return self.site.kind

    @property
    def channels(self) -> int:
        """The number of the norm's channels, or 0 if the norm does not state it."""
        return self.site.channels

    @property
    def statistics(self) -> Statistics | None:
        """A member of the enum `Statistics`: where mean and variance come from in eval mode.

        They may be kept from training, or be computed from each batch, sample or position.
        """
        return self.site.statistics

    @property
    def called(self) -> int:
        """How often one forward of the network calls the norm, or 0 if it never does."""
        return self.site.called

    @property
    def averages(self) -> bool:
        """Whether a BatchNorm can take the place of this norm.

        This norm must normalize by statistics of each sample, and the BatchNorm gets their average
        over images. A norm that forward never calls, or calls several times, cannot be replaced.
        """
        return self.site.called == 1 and self.site.averages

    @property
    def is_batchnorm(self) -> bool:
        """Whether the norm uses a running mean and variance, kept from training, in eval mode."""
        return self.site.is_batchnorm


@dataclass(frozen=True)
class Block:
    """One residual sum, y = skip + branch.

    Args:
        path: The path of the module whose forward adds. Further sums in the same module are called
            `path+2`, `path+3` ...
        stage: The path of the stage that the block belongs to.
        skip: The kind of the skip: `identity`, `projection` (it has a linear layer) or `other`
            (pooling, padding).
        order: Where the activation is: `post` (it follows the sum), `pre` (the branch begins with
            a norm or an activation) or `linear` (neither).
        tail: The path of the innermost module that returns the branch's value. None if no module
            does. A scalar on the branch is placed here.
        norms: Paths of the norms on the branch and on the skip, in order of the forward pass.
        last: The path of the branch's last norm. None if the branch has none.
        gate: The path of the module that multiplies the branch by a function of itself
            (squeeze-and-excitation and the like). None if none does.
        drop_path: The path of the module that drops the branch at random in training. None if none
            does.
        total: The node of the sum.
        branch: The node of the branch's value.
    """

    path: str
    stage: str
    skip: str
    order: str
    tail: str | None
    norms: tuple[str, ...]
    last: str | None
    gate: str | None
    drop_path: str | None
    total: fx.Node = field(repr=False, compare=False)
    branch: fx.Node = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        """The path, for messages. A block whose forward is the network's has an empty path."""
        return self.path or "the network itself"


@dataclass(frozen=True)
class Anatomy:
    """What `inspect` finds in a network: its residual blocks, norms and classifier.

    Args:
        blocks: The residual blocks, in order of the forward pass.
        norms: Every norm, in order of the forward pass. Norms that forward does not reach come
            last.
        classifier: The path of the last linear layer before the output.
        dropout: The path of the dropout before the classifier: a module, or an attribute
            `drop_rate`.
        traced: The recorded graph from which blocks, norms and sites were read.
        maps: Every called module that is y = act(s x + t) per channel in eval mode, a norm or a
            layer of an earlier conversion, in order of the forward pass.
        features: Whether the network returns features, as an encoder does, instead of class scores.
        widths: The numbers of outputs of the linear layers that end the network.
        outside: Paths of the modules that a conversion must leave as they are (`restrict`).
        provenance: Where the network is from, how it was converted, and the norms that it once had.
        functional_norms: A sentence for each module whose forward calls `batch_norm`, `layer_norm`
            or another norm's function itself, by its path. The path is empty for the network.
    """

    blocks: tuple[Block, ...]
    norms: tuple[Norm, ...]
    classifier: str | None
    dropout: str | None
    traced: Traced = field(repr=False, compare=False)
    maps: tuple[Site, ...] = ()
    features: bool = False
    widths: frozenset[int] = frozenset()
    outside: frozenset[str] = frozenset()
    provenance: Provenance = field(default_factory=Provenance, repr=False, compare=False)
    functional_norms: Mapping[str, str] = field(default_factory=dict)

    @property
    def refusals(self) -> tuple[tuple[str, str], ...]:
        """Pairs of a path and a reason, one for each module that cannot be converted.

        The module is scripted, so its operations cannot be seen, or its forward calls a function
        such as F.layer_norm itself, without a module that could be replaced.
        """
        return (*self.traced.opaque.items(), *self.functional_norms.items())

    def site(self, path: str) -> Site:
        """Return the site of a module, a record of what it is and how forward reaches it.

        Args:
            path: A dotted path of the module.
        """
        return self.traced.site(path)

    def takes_part(self, path: str) -> bool:
        """Whether the user lets a conversion change the module or block at a path.

        The options `only` and `skip` leave modules out (`restrict`).

        Args:
            path: The path of a module, or of a residual block. The second block of one module ends
                in `+2`, as `layer1.0+2`.
        """
        return path.partition("+")[0] not in self.outside

    @property
    def refused_norms(self) -> str:
        """A sentence on the norms that cannot be converted.

        It has the path of the first, the reason, and how many more there are. It is empty if there
        are none. Norms that the options `only` and `skip` leave out are not counted.
        """
        reasons = {norm.path: norm.site.refusal for norm in self.norms}
        reasons |= self.functional_norms
        refused = [
            (path or "the network itself", why)
            for path, why in reasons.items()
            if why is not None and self.takes_part(path)
        ]
        if not refused:
            return ""

        path, why = refused[0]
        sentence = f"{path}: {why}"
        if len(refused) > 1:
            sentence += f", and {len(refused) - 1} more norms"
        return sentence

    @property
    def included_blocks(self) -> tuple[Block, ...]:
        """The residual blocks, without those that the options `only` and `skip` leave out."""
        return tuple(block for block in self.blocks if self.takes_part(block.path))

    def current_path(self, original: str) -> str:
        """Return the path of the layer that a conversion has put in place of a norm.

        A conversion may put a `Chain` of two layers at the norm's path. The first of them, `inner`,
        is then the layer in place of the norm.

        Args:
            original: The path that the norm had before the conversion.
        """
        while isinstance(self.traced.modules.get(original), Chain):
            original = f"{original}.inner"
        return original

    def original_path(self, path: str) -> str:
        """Return the path that a norm had before it was converted.

        A conversion may put a `Chain` of two layers in place of a norm. For both of its layers, the
        original path is the path of the `Chain`. Any other path is returned as it is.

        Args:
            path: The path of the norm, or of a layer that a conversion has put in its place.
        """
        # The layers of a Chain are called `inner` and `then`. These names are cut off, unless the
        # source network itself had a norm at such a path.
        parts = path.split(".")
        while parts and parts[-1] in ("inner", "then"):
            if ".".join(parts) in self.provenance.original_paths:
                break
            parts.pop()
        return ".".join(parts)

    def kept_moments(self, path: str) -> tuple[Tensor, Tensor] | None:
        """Return the output mean and deviation, per channel, of a norm that a conversion replaced.

        Conversions keep the tensors of the norms that they take away in the network's provenance.

        Args:
            path: The path at which the norm stood, or the layer in its place stands.

        Returns:
            The mean and the standard deviation of the norm's output, each (C,). None if the
            provenance has no norm for the path.
        """
        original = self.original_path(path)
        names = ("running_mean", "weight", "bias", "output_mean", "output_std")
        tensors = [self.provenance.norms.get(f"{original}.{name}") for name in names]
        mean, gamma, beta, output_mean, output_std = tensors

        if mean is None:
            return None
        # Mean and deviation of the output may be stored. Otherwise the norm's gamma and beta give
        # them.
        if output_mean is not None and output_std is not None:
            return output_mean.double(), output_std.double()
        return output_moments(mean, gamma, beta)


def restrict(anatomy: Anatomy, only: Sequence[str] = (), skip: Sequence[str] = ()) -> Anatomy:
    """Return a copy of an anatomy in which `outside` has the modules that must not be changed.

    Args:
        anatomy: The anatomy of the whole network.
        only: Patterns of the modules that may be changed. An empty list allows all modules.
        skip: Patterns of the modules that stay as they are, even where `only` names them.

    Raises:
        OptionError: A pattern names no norm, block or linear layer.
    """
    modules = anatomy.traced.modules
    # A pattern must name something that a conversion can change.
    convertible = {id(modules[block.path.partition("+")[0]]) for block in anatomy.blocks}
    convertible |= {id(modules[norm.path]) for norm in anatomy.norms}
    paths: list[str] = []
    for path, module in modules.items():
        if id(module) in convertible or isinstance(module, LINEAR):
            paths.append(path)
    _check_patterns("only", only, paths)
    _check_patterns("skip", skip, paths)

    # A module with several paths is named if one of them is.
    skipped = _named_modules(modules, skip)
    taken = _named_modules(modules, only)
    outside: set[str] = set()
    for path, module in modules.items():
        is_left_out = bool(only) and id(module) not in taken
        if is_left_out or id(module) in skipped:
            outside.add(path)
    return replace(anatomy, outside=frozenset(outside))


def _check_patterns(option: str, patterns: Sequence[str], paths: Sequence[str]) -> None:
    """Raise OptionError if a pattern names no path.

    Args:
        option: The option that the patterns were given for, `only` or `skip`.
        patterns: The patterns.
        paths: The paths of the network's norms, blocks and linear layers.
    """
    for pattern in patterns:
        if any(matches(pattern, path) for path in paths):
            continue

        # Suggest the paths most like the pattern, also those of modules around.
        parents: set[str] = set()
        for path in paths:
            parents.update(_parents(path))
        remedy = near(pattern, sorted({*paths, *parents}), "`normswap inspect` lists their paths")
        raise OptionError(
            f"{spelled(option, pattern)} names no norm, block or linear layer of the network",
            remedy=remedy,
        )


def _parents(path: str) -> list[str]:
    """Return the paths of the modules that hold the module at a path, the outermost first.

    For `layer3.0.bn1` they are `layer3` and `layer3.0`.
    """
    return [path[:end] for end, letter in enumerate(path) if letter == "."]


def _named_modules(modules: Mapping[str, nn.Module], patterns: Sequence[str]) -> set[int]:
    """Return the ids, as `id(module)`, of the modules that one of the patterns names.

    Args:
        modules: The modules of the network, by every path of each.
        patterns: Dotted paths with wildcards (`matches`).
    """
    named: set[int] = set()
    for path, module in modules.items():
        if any(matches(pattern, path) for pattern in patterns):
            named.add(id(module))
    return named


def naming(paths: Iterable[str], others: Sequence[str]) -> list[str]:
    """Return a few patterns that name all modules at `paths` and, if possible, none at `others`.

    A pattern such as `layer3` names all modules inside of `layer3`. Where every wider pattern would
    name one of `others`, the path itself is the pattern.

    Args:
        paths: The paths to name.
        others: The paths that should not be named.
    """
    paths = list(paths)
    # A pattern for `layer3` names `layer3.0` in any case, so others inside of `paths` are dropped.
    others = [other for other in others if not any(matches(path, other) for path in paths)]
    chosen: list[str] = []
    for path in paths:
        if any(matches(pattern, path) for pattern in chosen):
            continue

        parents = _parents(path)
        # The widest patterns come first. For layer3.0.bn1 they are layer3 and layer3.0, then *.bn1,
        # then the path itself.
        candidates = [*parents]
        if parents:
            candidates.append(f"*{path.removeprefix(parents[-1])}")
        candidates.append(path)
        for candidate in candidates:
            if candidate == path or not any(matches(candidate, other) for other in others):
                chosen.append(candidate)
                break
    return chosen


def patterns(options: Body) -> dict[str, list[str]]:
    """Return the patterns in a scheme's options `only` and `skip`, as lists, by the option's name.

    Args:
        options: The options of a conversion. The value of each may be one pattern or several.

    Raises:
        OptionError: A pattern is no string.
    """
    by_option: dict[str, list[str]] = {}
    for name in ("only", "skip"):
        # A single pattern may be given by itself, without a list.
        value = options.get(name) or []
        listed: list[object] = [value]
        if isinstance(value, Iterable) and not isinstance(value, str):
            listed = list(value)

        strings = [pattern for pattern in listed if isinstance(pattern, str)]
        if len(strings) < len(listed):
            # Some entry is no string.
            raise OptionError(
                f"{spelled(name, value)} is no pattern of paths",
                remedy="For instance layer3, or *.bn1",
            )
        if strings:
            by_option[name] = strings
    return by_option


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern names the module at a path, or a module that holds it.

    Args:
        pattern: A dotted path, which may have the wildcards `*`, `?` and `[...]`.
        path: The path of the module.
    """
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")
