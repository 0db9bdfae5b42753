"""docs/ says what is so: workload.md is run, pages made from code are up to date, links lead on.

All blocks of workload.md are used here, and all of its commands; where a command trains, in mode
local. The commands of every other page are in test_shown_commands.py, which also finds a block of
code that no test uses.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from samestep import Mode, load_spec, train
from samestep.cli import metricsdoc
from samestep.cli.main import app
from samestep.cli.specdoc import render
from samestep.metric_names import METRICS
from samestep.spec import JobSpec, bits_fields

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
WORKLOAD = (ROOT / "docs" / "workload.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"```(\w+)\n(.*?)```", flags=re.DOTALL)
# Without Ray and MLflow, whatever the command says.
LOCAL = "--mode local --set tracking.enabled=false"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with the files of docs/workload.md, each named by its first line."""
    names = []
    for _, text in BLOCK.findall(WORKLOAD):
        name = re.match(r"# (\S+)\n", text)
        assert name is not None, f"a block without the name of a file: {text[:60]}"
        (tmp_path / name[1]).write_text(text, encoding="utf-8")
        names.append(Path(name[1]).stem)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    for name in names:
        sys.modules.pop(name, None)


def test_the_plain_loop_and_the_workload_learn_the_same_thing(
    example: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    runpy.run_path("plain.py")
    accuracy = float(re.findall(r"accuracy ([\d.]+)", capsys.readouterr().out)[-1])
    assert accuracy >= 0.9
    runner = CliRunner()
    commands = re.findall(r"^    (samestep .*)$", WORKLOAD, flags=re.MULTILINE)
    outputs = {}
    for command in commands:
        given = LOCAL if " train " in command else ""
        result = runner.invoke(app, [*command.split()[1:], *given.split()])
        assert result.exit_code == 0, result.output
        outputs[command] = result.output
    assert outputs["samestep compare wine four"].startswith("identical through step 49 ")
    best = re.search(
        r"best +after (\d+) steps: accuracy (0\.9\d*|1) \(max is best\)",
        outputs["samestep show wine"],
    )
    assert best is not None
    evaluated = outputs["samestep evaluate wine --checkpoint best"]
    assert f"checkpoint after {best[1]} steps" in evaluated
    assert "equal bit for bit to the evaluation in the ledger" in evaluated
    namespace = runpy.run_path("use.py")
    assert isinstance(namespace["model"], torch.nn.Module)
    tuned = train(local("tuned.yaml"), name="tuned")
    assert tuned.status == "done"
    assert tuned.evaluation is not None
    assert tuned.evaluation["accuracy"] >= 0.9


def local(job: str) -> JobSpec:
    return load_spec(Path(job), {"mode": Mode.LOCAL, "tracking.enabled": False})


@pytest.mark.parametrize("name", ["plateau", "told"])
def test_the_other_jobs_train(name: str, example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = train(local(f"{name}.yaml"))
    assert outcome.status == "done"
    printed = re.findall(r"epoch (\d): loss [\d.]+, \{'accuracy': ", capsys.readouterr().out)
    assert printed == (["0", "1"] if name == "told" else [])


def test_the_page_of_the_spec_is_up_to_date() -> None:
    page = (ROOT / "docs" / "spec.md").read_text(encoding="utf-8")
    assert page == render(), "run: python -m samestep.cli.specdoc > docs/spec.md"
    assert all(f"| `{path}` |" in page for path, _ in bits_fields())


def test_the_page_of_the_metrics_is_up_to_date() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    told = "run: python -m samestep.cli.metricsdoc > docs/metrics.md"
    assert page == metricsdoc.render(), told
    assert all(f"| `{metric.name}` |" in page for metric in METRICS)


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
