"""How long a fit still takes, said in sentences where no bar is drawn."""

import time
from collections.abc import Callable

# Seconds until the first sentence, and between two of them.
_FIRST = 5.0
_BETWEEN = 30.0


class Pace:
    """A `progress` function that says how far some work is, and about how long the rest takes.

    The work is done in parts, such as batches. The time of a part is measured from the end of the
    first part, because the first one also takes the time of all that is prepared once.

    Args:
        work: The name of the work. Each sentence begins with it.
        say: Called with each sentence.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, work: str, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        # The name of the work, the function that gets each sentence, and the clock in seconds.
        self.work = work
        self.say = say
        self.clock = clock
        # No sentence is said before this time.
        self.due = clock() + _FIRST
        # The work is done in parts, such as batches, and perhaps in several passes over all parts.
        # This is how many parts of the pass were done at the last call.
        self.last_done = 0
        # When the first call of the pass came, and how many parts were done then.
        self.begun = 0.0
        self.begun_with = 0

    def __call__(self, done: int, total: int) -> None:
        """Note how many parts of the work, such as batches, are done. Say it if it is time to.

        Args:
            done: How many parts are done. A smaller number than in the call before means that
                another pass over the parts has begun.
            total: How many parts a pass has. 0 if that is not known.
        """
        # The first call of a pass only starts the measurement of time, because the parts before it
        # also took the time of all that is prepared once.
        now = self.clock()
        is_first = self.last_done == 0 or done < self.last_done
        self.last_done = done
        if is_first:
            self.begun = now
            self.begun_with = done
            return
        # A sentence about work that is finished is of no use.
        if now < self.due or done == total:
            return

        self.due = now + _BETWEEN
        sentence = f"{self.work}: {done}"
        if total:
            seconds_a_part = (now - self.begun) / (done - self.begun_with)
            sentence += f" of {total}, about {seconds_a_part * (total - done):.0f} s left"
        self.say(sentence)
