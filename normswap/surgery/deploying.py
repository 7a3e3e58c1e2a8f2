"""After a conversion, the fusing methods of other libraries find nothing left to do.

Ultralytics calls `fuse()` before it predicts. Users of timm call `fuse()`, `reparameterize()` or
`switch_to_deploy()`. These methods read the statistics of norms. They also drop the bias of a
convolution in front of a norm, because no network has a bias there before it is folded.
"""

from collections.abc import Iterable

from torch import nn

from normswap import copying

_NAMES = ("fuse", "fuse_convs", "reparameterize", "switch_to_deploy")


class AlreadyDone:
    """Replaces a module's method that fuses norms, after the norms are folded. It changes nothing.

    Args:
        module: The module, which the method returns.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: object, **kwargs: object) -> nn.Module:
        return self.module


def keep_as_deployed(model: nn.Module, gone: Iterable[str]) -> None:
    """Make fusing methods do nothing, in place, in the modules around norms that are gone.

    Args:
        model: The network after a step.
        gone: The paths of norms that the step replaced by a layer of another class.
    """
    # The paths of all modules around these norms. The network itself has an empty path.
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
