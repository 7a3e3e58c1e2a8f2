"""Work that is done in a copy of this process, which has imported torch already.

A new Python takes seconds to import torch. A copy shows the same where the imports of other
libraries are not what is tested. It cannot train: autograd's threads do not survive a fork.
"""

import json
import os
import traceback
import warnings
from collections.abc import Callable
from typing import Any


def fork() -> int:
    """Return what `os.fork` returns."""
    # Python 3.12 warns of a fork beside threads. Those of pytest-xdist only wait.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def started(work: Callable[[], int]) -> int:
    """Return the number of a copy of this process, which does the work and ends.

    Args:
        work: Returns the exit code.
    """
    child = fork()
    if not child:
        code = 70
        try:
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def ended(child: int) -> int:
    """Wait for the end of a process that `started` has started; return its exit code."""
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def result_of(work: Callable[[], object]) -> Any:
    """Return what the work returns in a copy of this process; it must be plain data."""
    reader, writer = os.pipe()

    def answer() -> int:
        os.write(writer, json.dumps(work()).encode())
        return 0

    code = ended(started(answer))
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as stream:
        text = stream.read()
    assert code == 0
    return json.loads(text)
