"""Commands of samestep in a fresh process of their own: python fresh.py COMMANDS RESULTS.

COMMANDS is a JSON file, a list of {"args": [...], "input": text}; all are run one after another in
the working directory, under the environment that numerics asks for. RESULTS gets a list of
{"status": int, "out": text, "err": text}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from samestep.exact.numerics import environment
from samestep.spec import parse_spec

os.environ.update(environment(parse_spec({"workload": "a:A", "batch_size": 1, "max_steps": 1})))

from typer.testing import CliRunner

from samestep.cli.main import app

results = []
for command in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
    found = CliRunner().invoke(app, command["args"], input=command.get("input"))
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    results.append({"status": found.exit_code, "out": found.stdout, "err": found.stderr})
Path(sys.argv[2]).write_text(json.dumps(results), encoding="utf-8")
