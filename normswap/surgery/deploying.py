"""Other libraries' own deploying, after a conversion: it finds nothing left to do.

Ultralytics calls `fuse()` before it predicts, timm `fuse()`, `reparameterize()` or
`switch_to_deploy()`. They read the statistics of norms, and drop the bias of a convolution in front
of a norm, as no network has one there before it is folded.
"""

from collections.abc import Iterable

from torch import nn

from normswap import copying

_NAMES = ("fuse", "fuse_convs", "reparameterize", "switch_to_deploy")


class AlreadyDone:
    """Stands in the place of a module's method that would fuse what is folded; it changes nothing.

    Args:
        module: The module, which the method returns.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: object, **kwargs: object) -> nn.Module:
        return self.module


def keep_as_deployed(model: nn.Module, gone: Iterable[str]) -> None:
    """Let the fusing methods of the modules around norms that are gone do nothing, in place.

    Args:
        model: The network after a step.
        gone: The paths of norms in whose place something of another class stands.
    """
    around: set[str] = set()
    for path in gone:
        parts = path.split(".")
        around.update(".".join(parts[:end]) for end in range(len(parts)))

    modules = copying.tree(model)
    for path in around & modules.keys():
        module = modules[path]
        for name in _NAMES:
            if callable(getattr(type(module), name, None)):
                module.__dict__[name] = AlreadyDone(module)
