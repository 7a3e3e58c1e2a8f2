"""`Pace` says now and then how long a fit still takes."""

from normswap.models.pace import Pace


def test_the_rest_is_said_after_some_seconds_and_not_at_every_layer() -> None:
    seconds = 0.0
    said: list[str] = []
    pace = Pace("fitting", said.append, clock=lambda: seconds)

    for layer in range(1, 11):
        seconds += 4
        pace(layer, 10)

    assert said == ["fitting: 2 of 10, about 32 s left"]


def test_a_pass_that_begins_again_is_timed_anew() -> None:
    seconds = 0.0
    said: list[str] = []
    pace = Pace("fitting", said.append, clock=lambda: seconds)

    calls = ((2.0, 2, 4), (3.0, 3, 4), (20.0, 1, 4), (24.0, 2, 4), (70.0, 3, 0))
    for moment, done, total in calls:
        seconds = moment
        pace(done, total)

    assert said == ["fitting: 2 of 4, about 8 s left", "fitting: 3"]


def test_a_short_fit_says_nothing() -> None:
    said: list[str] = []
    pace = Pace("fitting", said.append, clock=lambda: 0.0)

    pace(1, 1)

    assert said == []
