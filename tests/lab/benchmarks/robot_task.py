"""A small control task seen by a camera: a hand reaches for a thing. Numpy, and the same every
time.

The world is the unit square from above. Frames show it: a white disc, the hand; a red one, the
thing; a green one, which is there to be told from it; before a coloured background, another one in
every episode. Many episodes go at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
# The side of an image, in pixels.
SIDE = 64
# The steps of an episode.
STEPS = 30
RED = (220, 0, 0)
GREEN = (0, 200, 0)
WHITE = (255, 255, 255)
# The longest step, and the distance at which something is touched or reached.
SPEED = 0.06
NEAR = 0.06


class Task:
    """Episodes that begin as `seed` says.

    Args:
        hand, thing, decoy: (N, 2), places in 0..1.
        done: (N,), whether the hand has been at the thing; nothing moves any more.
        still: (N, 3, SIDE, SIDE), what stays where it is.
    """

    def __init__(self, episodes: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.hand, self.thing, self.decoy = random.uniform(0.1, 0.9, (3, episodes, 2))
        self.still = np.stack([_background(random) for _ in range(episodes)])
        _disc(self.still, self.decoy, GREEN, 5)
        _disc(self.still, self.thing, RED, 5)
        self.done = self.distance() < NEAR

    def distance(self) -> Array:
        """(N,) from the hand to the thing."""
        return np.asarray(np.linalg.norm(self.hand - self.thing, axis=1))

    def expert(self) -> Array:
        """(N, 2), the action of one who sees the state: straight to the thing."""
        return _at_most_one((self.thing - self.hand) / SPEED)

    def step(self, action: Array) -> None:
        """Move by `action` (N, 2), in units of SPEED; no further than 1."""
        moved = np.clip(self.hand + SPEED * _at_most_one(action), 0, 1)
        self.hand = np.where(self.done[:, None], self.hand, moved)
        self.done |= self.distance() < NEAR

    def frames(self) -> NDArray[np.uint8]:
        """(N, 3, SIDE, SIDE), RGB."""
        picture = self.still.copy()
        _disc(picture, self.hand, WHITE, 3)
        return picture.round().astype(np.uint8)


_PIXELS = np.stack(np.meshgrid(np.arange(SIDE) + 0.5, np.arange(SIDE) + 0.5), axis=-1)


def _disc(frames: Array, places: Array, colour: tuple[int, ...], radius: float) -> None:
    """Onto each frame, with a smooth rim."""
    away = np.linalg.norm(_PIXELS - SIDE * places[:, None, None, :], axis=-1)
    frames += np.clip(radius + 0.5 - away, 0, 1)[:, None] * (
        np.array(colour)[None, :, None, None] - frames
    )


def _at_most_one(action: Array) -> Array:
    return np.asarray(action / np.maximum(np.linalg.norm(action, axis=1, keepdims=True), 1))


def _background(random: np.random.Generator) -> Array:
    """(3, SIDE, SIDE) in 40..160: noise whose amplitude falls with the frequency, as that of
    photographs.
    """
    rows = np.fft.fftfreq(SIDE)[:, None]
    columns = np.fft.rfftfreq(SIDE)
    size = np.maximum(np.hypot(rows, columns), 1 / SIDE)
    noise = np.fft.irfft2(
        np.fft.rfft2(random.standard_normal((3, SIDE, SIDE))) / size, s=(SIDE, SIDE)
    )
    low = noise.min()
    high = noise.max()
    return np.asarray(40 + 120 * (noise - low) / (high - low))


def demonstrations(
    episodes: int, seed: int, jitter: float = 0.5
) -> tuple[NDArray[np.uint8], Array]:
    """Frames (M, 3, SIDE, SIDE) and the expert's actions (M, 2); what it does is shaken, to show
    the way back.
    """
    task = Task(episodes, seed)
    random = np.random.default_rng(seed + 1)
    frames = []

    actions = []
    for _ in range(STEPS):
        going = ~task.done
        action = task.expert()
        frames.append(task.frames()[going])
        actions.append(action[going])
        task.step(action + jitter * random.standard_normal(action.shape))

    return np.concatenate(frames), np.concatenate(actions)
