"""Adam in NumPy, for descents of many small steps that run on the CPU whatever the device is."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
# The rates of Adam's two averages, and the number that keeps its quotient finite.
MEAN_RATE = 0.1
SQUARE_RATE = 0.001
LEAST = 1e-8


@dataclass
class Adam:
    """Adam's descent (Kingma & Ba 2015) on values that stay within a bound.

    Args:
        values: The values, which `step` changes. They are given as the descent begins.
        rate: The learning rate.
        farthest: The bound: values stay between -farthest and farthest.
        steps: The number of steps that were taken.

    Attributes:
        mean: The moving average of the gradient.
        square: The moving average of the gradient's square.
    """

    values: Numbers
    rate: float
    farthest: float
    steps: int = 0
    mean: Numbers = field(init=False)
    square: Numbers = field(init=False)

    def __post_init__(self) -> None:
        self.mean = np.zeros_like(self.values)
        self.square = np.zeros_like(self.values)

    def step(self, gradient: Numbers) -> None:
        """Change `values`, in place, by one step of Adam.

        Args:
            gradient: The derivative of the loss by each of the values.
        """
        self.steps += 1
        self.mean += MEAN_RATE * (gradient - self.mean)
        self.square += SQUARE_RATE * (gradient**2 - self.square)

        # Both averages begin at zero, so they are too small at first. The divisors correct that.
        mean = self.mean / (1 - (1 - MEAN_RATE) ** self.steps)
        deviation = np.sqrt(self.square / (1 - (1 - SQUARE_RATE) ** self.steps)) + LEAST
        self.values -= self.rate * mean / deviation
        np.clip(self.values, -self.farthest, self.farthest, out=self.values)
