"""Random numbers that start from a fixed seed for a while."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def seeded(*devices: torch.device, seed: int = 0) -> Iterator[None]:
    """Seed the random numbers inside a `with` block, and restore the user's after it.

    Args:
        devices: The devices whose generators are seeded. The CPU's generator is always seeded.
        seed: The seed of all generators.
    """
    accelerators = [device for device in devices if device.type not in ("cpu", "meta", "mps")]

    # Each fork restores its generator when the block ends.
    with ExitStack() as forks:
        forks.enter_context(torch.random.fork_rng(devices=[]))
        torch.default_generator.manual_seed(seed)

        for device in accelerators:
            forks.enter_context(torch.random.fork_rng([device], device_type=device.type))
            torch.get_device_module(device).manual_seed(seed)
        yield
