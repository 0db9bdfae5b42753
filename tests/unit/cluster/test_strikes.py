from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.cluster.strikes import (
    MEANING,
    OF_NODES,
    TAKES_NODE,
    Fault,
    Strike,
    parse_faults,
    random_strikes,
    read_strikes,
    refuse_of_nodes,
)
from samestep.errors import SpecError


def write(folder: Path, text: str) -> Path:
    path = folder / "faults.yaml"
    path.write_text(text)
    return path


def test_a_file_is_read_in_order_of_steps(tmp_path: Path) -> None:
    path = write(
        tmp_path, "- {fault: kill_node, step: 9}\n- {fault: kill_worker, step: 4, worker: 2}\n"
    )
    assert read_strikes(path) == [
        Strike(fault=Fault.KILL_WORKER, step=4, worker=2),
        Strike(fault=Fault.KILL_NODE, step=9),
    ]
    assert parse_faults(str(path)) == read_strikes(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {fault: kill_wroker, step: 1}", "item 0: there is no fault 'kill_wroker': did you me"),
        ("- {step: 1}", "there is no fault 'None'. Allowed: kill_worker, kill_all_workers, term"),
        ("- {fault: kill_worker}", "item 0: step: Field required"),
        ("- {fault: kill_worker, step: -1}", "step: Input should be greater than or equal to 0"),
        ("- {fault: kill_worker, step: 1, rank: 2}", "rank: Extra inputs are not permitted"),
        (
            "- kill_worker",
            "item 0: give a mapping such as {fault: kill_worker, step: 20}: 'kill_worker'",
        ),
        ("fault: kill_worker", "must be a list of faults, such as"),
        ("[]", "must be a list of faults"),
        ("- {", "can't read the faults file"),
    ],
)
def test_a_bad_faults_file_is_refused_by_item(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_strikes(write(tmp_path, text))
    assert message in str(caught.value)


def test_a_missing_faults_file_and_a_bad_seed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"can't read the faults file .*nowhere\.yaml"):
        parse_faults(str(tmp_path / "nowhere.yaml"))
    with pytest.raises(SpecError, match="random: takes a number of 0 or more, got 'x'"):
        parse_faults("random:x")
    assert parse_faults("random:17") == 17


def test_every_fault_is_in_the_documents_with_what_it_means() -> None:
    text = (Path(__file__).parents[3] / "docs" / "faults.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, flags=re.MULTILINE))
    assert table == {str(fault): meaning for fault, meaning in MEANING.items()}


def test_the_faults_file_of_the_documents_is_read(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "faults.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    faults = [strike.fault for strike in read_strikes(write(tmp_path, block))]
    assert faults == [Fault.KILL_WORKER, Fault.FREEZE_WORKER, Fault.KILL_RECORDER]


@given(
    seed=st.integers(0, 10**6),
    number=st.integers(0, 100),
    num_steps=st.integers(2, 500),
    num_nodes=st.integers(1, 8),
)
def test_random_strikes_fall_inside_the_run_and_leave_a_node(
    seed: int, number: int, num_steps: int, num_nodes: int
) -> None:
    strikes = random_strikes(seed, number, num_steps=num_steps, num_nodes=num_nodes)
    assert strikes == random_strikes(seed, number, num_steps=num_steps, num_nodes=num_nodes)
    assert 1 <= len(strikes) <= 3
    steps = [strike.step for strike in strikes]
    assert steps == sorted(set(steps))
    assert all(1 <= step < max(3, num_steps) for step in steps)
    left = num_nodes
    for strike in strikes:
        left += (strike.fault is Fault.ADD_NODE) - (strike.fault in TAKES_NODE)
        assert left >= 1


def test_rounds_and_seeds_differ() -> None:
    drawn = {
        tuple(random_strikes(seed, number, num_steps=300, num_nodes=3))
        for seed in range(3)
        for number in range(10)
    }
    assert len(drawn) >= 25


def test_on_a_cluster_that_is_given_no_node_is_struck() -> None:
    strikes = [Strike(fault=fault, step=1) for fault in (Fault.CUT_NODE, Fault.KILL_WORKER)]
    with pytest.raises(SpecError) as caught:
        refuse_of_nodes([*strikes, Strike(fault=Fault.ADD_NODE, step=2)])
    assert str(caught.value).startswith("add_node, cut_node can't strike a cluster that is given")
    assert "possible there: kill_worker, kill_all_workers, terminate_worker" in str(caught.value)
    refuse_of_nodes(strikes[1:])
    drawn = {
        strike.fault
        for number in range(40)
        for strike in random_strikes(1, number, num_steps=300, num_nodes=None)
    }
    assert drawn == set(Fault) - set(OF_NODES)
