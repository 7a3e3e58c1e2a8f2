"""After a conversion, the methods of other libraries that fuse norms find nothing left to do.

Ultralytics calls `fuse()` before it predicts. Users of timm call `fuse()`, `reparameterize()` or
`switch_to_deploy()`. These methods read the statistics of norms. They also drop the bias of a
convolution in front of a norm, because no network has a bias there before it is folded.
"""

from collections.abc import Iterable

from torch import nn

from normswap import copying

# The names of such methods.
_NAMES = ("fuse", "fuse_convs", "reparameterize", "switch_to_deploy")


class AlreadyDone:
    """Takes the place of a module's method that fuses norms. A call returns the module unchanged.

    Args:
        module: The module that has the method.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: object, **kwargs: object) -> nn.Module:
        return self.module


def keep_as_deployed(model: nn.Module, gone: Iterable[str]) -> None:
    """Make methods that fuse norms do nothing, in place, in the modules around norms that are gone.

    Args:
        model: The network after a step.
        gone: The paths of norms that the step replaced by a layer of another class.
    """
    # The paths of all modules around these norms: "", `a` and `a.b` for a norm at `a.b.bn`. The
    # network itself has the empty path.
    around: set[str] = set()
    for path in gone:
        parts = path.split(".")
        around.update(".".join(parts[:end]) for end in range(len(parts)))

    modules = copying.tree(model)
    for path in around & modules.keys():
        module = modules[path]
        for name in _NAMES:
            # An attribute of the module goes before the method of its class.
            if callable(getattr(type(module), name, None)):
                module.__dict__[name] = AlreadyDone(module)
