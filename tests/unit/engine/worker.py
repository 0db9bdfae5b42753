"""The processes of the tests' pool: each takes tasks over a socket, one after another.

A task is the name of a function of `tasks` and its arguments. The processes start with the
environment that a worker has, so torch is loaded under the same settings; it is loaded once, and
the processes are forked then, before anything was computed.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
import warnings
from multiprocessing.connection import Client


def main(address: str, num_processes: int) -> None:
    import tasks
    import torch._dynamo  # noqa: F401 - what the first optimizer would load

    warnings.simplefilter("error")
    children = []
    for _ in range(num_processes):
        child = os.fork()
        if child == 0:
            serve(address, tasks)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def serve(address: str, tasks: object) -> None:
    with Client(address, family="AF_UNIX") as connection:
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
            if answer[0] == "raised":
                gc.collect()  # the frames that held the group must be gone for its sockets to close
            connection.send(answer)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
