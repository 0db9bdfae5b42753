"""A process of the tests' pool: takes tasks over a socket, one after another.

A task is the name of a function of `tasks` and its arguments. The process starts with the
environment that a worker has, so torch is loaded under the same settings.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from multiprocessing.connection import Client


def main(address: str) -> None:
    warnings.simplefilter("error")
    with Client(address, family="AF_UNIX") as connection:
        import tasks

        connection.send("ready")
        while True:
            try:
                name, arguments = connection.recv()
            except EOFError:
                return
            try:
                answer = ("done", getattr(tasks, name)(**arguments))
            except Exception as error:
                text = "".join(traceback.format_exception(error))
                answer = ("raised", (type(error).__name__, str(error), text))
            connection.send(answer)


if __name__ == "__main__":
    main(sys.argv[1])
