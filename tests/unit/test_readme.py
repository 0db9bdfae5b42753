"""The README's example is taken from the README and used."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep import load_spec, train
from samestep.checkpoint.storage import Storage
from samestep.telemetry.ledger import steps
from samestep.workload import Workload, load_workload

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder with the example's files, each named by its first line."""
    for _, name, text in re.findall(r"```(\w+)\n# (\S+)\n(.*?)```", README, flags=re.DOTALL):
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "line", raising=False)  # another test's of that name
    yield tmp_path
    sys.modules.pop("line", None)


def test_the_example_of_the_readme_learns_its_line(example: Path) -> None:
    spec = load_spec(example / "job.yaml")
    workload: Workload = load_workload(spec.workload, spec.args, [example])
    torch.manual_seed(0)
    model, data = workload.model(), workload.data()
    optimizer = workload.optimizer(model)
    samples = [data[index] for index in range(50)]
    losses = []
    for _ in range(60):
        loss = workload.loss(model, workload.collate(samples))
        assert isinstance(loss, torch.Tensor)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10


def test_samestep_trains_the_example_of_the_readme(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(example)
    outcome = train(load_spec("job.yaml", {"mode": "local", "tracking.enabled": False}))
    assert (outcome.status, outcome.step) == ("done", 80)
    (last,) = [record for step, record in steps(Storage.at(outcome.run)).items() if step == 79]
    assert last.loss is not None
    assert last.loss < 0.05


def test_a_script_trains_the_example_of_the_readme(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (script,) = re.findall(r"```python\n(?!# )(.*?)```", README, flags=re.DOTALL)
    with (example / "job.yaml").open("a", encoding="utf-8") as job:
        job.write("max_steps: 3\nmode: local\ntracking: {enabled: false}\n")
    text = (example / "job.yaml").read_text(encoding="utf-8")
    (example / "job.yaml").write_text(re.sub("^epochs: .*\n", "", text, flags=re.MULTILINE))
    monkeypatch.chdir(example)
    namespace: dict[str, Any] = {}
    exec(script, namespace)
    assert (namespace["outcome"].status, namespace["outcome"].step) == ("done", 3)


def test_every_link_of_the_readme_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_make_target_that_the_documents_name_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    text = README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\bmake ([a-z][a-z-]*)", text)) <= targets
