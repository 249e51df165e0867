"""A process of `math.MathReward`: reads pairs of answers as lines of JSON and writes `true` or `false` for each.

The first line holds the seconds for one answer. A worker ends itself a little later than its owner would end it: a
long computation does not outlive a killed training run.
"""

import json
import logging
import math
import os
import resource
import signal
import sys
from typing import Any

_MEMORY = 4 << 30


def main() -> None:
    from math_verify import parse, verify

    def read(text: str) -> list[Any]:
        return parse(rf"\boxed{{{text}}}", parsing_timeout=None)  # pyright: ignore[reportArgumentType]

    logging.disable(logging.CRITICAL)  # that its time limits are off
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a library prints is a verdict
    seconds = None
    for line in sys.stdin:
        content = json.loads(line)
        if seconds is None:
            seconds = math.ceil(content[0]) + 1
            equal = True
        else:
            signal.alarm(seconds)
            try:
                right, given = map(read, content)
                equal = bool(verify(right, given, timeout_seconds=None))
            except Exception:  # whatever a strange expression provokes in a parser
                equal = False
            signal.alarm(0)
        replies.write(json.dumps(equal) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
