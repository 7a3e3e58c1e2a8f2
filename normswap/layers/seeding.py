"""Random numbers that begin anew for a while."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def seeded(*devices: torch.device) -> Iterator[None]:
    """Draw the same values each time, on the CPU and these devices; the user's random numbers go on
    afterwards.
    """
    others = [device for device in devices if device.type not in ("cpu", "meta", "mps")]
    with ExitStack() as forks:
        forks.enter_context(torch.random.fork_rng(devices=[]))
        torch.default_generator.manual_seed(0)
        for device in others:
            forks.enter_context(torch.random.fork_rng([device], device_type=device.type))
            torch.get_device_module(device).manual_seed(0)
        yield
