"""A small control task seen by a camera: a hand reaches for a thing. Numpy, and the same every
time.

The world is the unit square from above. Frames show it: a white disc, the hand; a red one, the
thing; a green one, which is there to be told from it; before a coloured background, another one in
every episode. Many episodes go at once.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Camera:
    """How the world is seen; each episode draws its own light and place of the camera.

    Args:
        darkest: The light of each colour is drawn from this share of the usual one up to all of it.
        away: How many pixels the picture is shifted at most, along each side.
        zoom: How large things are seen.
    """

    darkest: float = 1.0
    away: float = 0.0
    zoom: float = 1.0


class Task:
    """Episodes that begin as `seed` says. The camera changes what is seen, not what happens.

    Args:
        hand, thing, decoy: (N, 2), places in 0..1.
        done: (N,), whether the hand has been at the thing; nothing moves any more.
        still: (N, 3, SIDE, SIDE), what stays where it is.
        light: (N, 3), how much of each colour's light there is.
        shift: (N, 2), the pixels by which the camera's picture is shifted.
    """

    def __init__(self, episodes: int, seed: int, camera: Camera | None = None) -> None:
        random = np.random.default_rng(seed)
        self.hand, self.thing, self.decoy = random.uniform(0.1, 0.9, (3, episodes, 2))
        self.still = np.stack([_background(random) for _ in range(episodes)])
        self.camera = camera or Camera()
        self.light = random.uniform(self.camera.darkest, 1, (episodes, 3))
        self.shift = self.camera.away * random.uniform(-1, 1, (episodes, 2))
        self._show(self.still, self.decoy, GREEN, 5)
        self._show(self.still, self.thing, RED, 5)
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

    def frames(self, going: NDArray[np.bool_] | None = None) -> NDArray[np.uint8]:
        """(N, 3, SIDE, SIDE), RGB; of all episodes, or of those that `going` (N,) chooses."""
        chosen = np.ones_like(self.done) if going is None else going
        picture = self.still[chosen]
        self._show(picture, self.hand[chosen], WHITE, 3, self.shift[chosen])
        picture *= self.light[chosen, :, None, None]
        return picture.round().astype(np.uint8)

    def _show(
        self,
        frames: Array,
        places: Array,
        colour: tuple[int, ...],
        radius: float,
        shift: Array | None = None,
    ) -> None:
        """Draw a disc onto each frame, with a smooth rim; `shift`: of these frames, or of all."""
        zoom = self.camera.zoom
        shift = self.shift if shift is None else shift
        middle = SIDE / 2 + zoom * SIDE * (places - 0.5) + shift
        across, down = _PIXELS - middle.T[:, :, None]
        away = np.hypot(across[:, None, :], down[:, :, None])
        cover = np.clip(zoom * radius + 0.5 - away, 0, 1)[:, None]
        frames += cover * (np.array(colour)[None, :, None, None] - frames)


# The middles of the pixels along a side.
_PIXELS = np.arange(SIDE) + 0.5


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
