from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from samestep.errors import SpecError
from samestep.spec import (
    JobSpec,
    Mode,
    bits_fields,
    differing_fields,
    dump_spec,
    field_at,
    load_spec,
    parse_override,
    parse_spec,
)
from samestep.spec_training import source_uri

MINIMAL: dict[str, Any] = {"workload": "digits:Digits", "batch_size": 64, "epochs": 10}


def spec(**fields: Any) -> JobSpec:
    return parse_spec({**MINIMAL, **fields})


def refusal(**fields: Any) -> str:
    with pytest.raises(SpecError) as caught:
        spec(**fields)
    return str(caught.value)


def models(model: type[BaseModel] = JobSpec) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        for candidate in (field.annotation, *get_args(field.annotation)):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                yield from models(candidate)


def is_part(field: Any) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def leaves(model: type[BaseModel] = JobSpec) -> Iterator[tuple[str, Any]]:
    for part in models(model):
        yield from ((f"{part.__name__}.{name}", field) for name, field in part.model_fields.items())


# What every field says about itself


@pytest.mark.parametrize(("name", "field"), list(leaves()), ids=[name for name, _ in leaves()])
def test_a_field_says_whether_it_affects_bits(name: str, field: Any) -> None:
    assert isinstance(field.json_schema_extra["affects_bits"], bool), name


def test_every_leaf_has_a_description_and_every_part_a_docstring() -> None:
    silent = [name for name, field in leaves() if not field.description and not is_part(field)]
    assert silent == []
    assert [part.__name__ for part in models() if not part.__doc__] == []


def test_every_path_that_is_named_leads_to_a_value() -> None:
    paths = [path for path, _ in bits_fields()]
    assert len(paths) == len(set(paths))
    for path in paths:
        field_at(spec(), path)


def test_what_decides_bits_is_told_from_what_may_change() -> None:
    affects = dict(bits_fields())
    assert affects["seed"]
    assert affects["shards"]
    assert affects["threads"]
    assert affects["numerics.tf32"]
    assert not affects["workers.max"]
    assert not affects["mode"]
    assert not affects["loader_processes"]
    assert not affects["epochs"]
    assert not affects["checkpoint.keep"]
    assert affects["ema.decay"]
    assert affects["init_from.path"]
    assert affects["evaluate.every_steps"]
    assert affects["early_stop.metric"]
    assert not affects["early_stop.patience"]
    assert not affects["checkpoint.best.metric"]


def test_the_schema_carries_description_and_marking() -> None:
    field = JobSpec.model_json_schema()["properties"]["shards"]
    assert field["affects_bits"] is True
    assert "equal parts" in field["description"]
    assert field["default"] == 4


# Refusals


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bacth_size": 1}, "bacth_size: unknown field; did you mean batch_size?"),
        (
            {"checkpoint": {"evry_steps": 1}},
            "checkpoint.evry_steps: unknown field; did you mean every_steps?",
        ),
        (
            {"faults": {"retries": {"zzz": 1}}},
            "faults.retries.zzz: unknown field; allowed: user, infrastructure",
        ),
        ({"batch_size": 0}, "batch_size: Input should be greater than or equal to 1, got 0"),
        ({"batch_size": True}, "batch_size: Input should be a valid integer, got True"),
        ({"batch_size": "many"}, "batch_size: Input should be a valid integer, got 'many'"),
        ({"batch_size": 64.0}, "batch_size: Input should be a valid integer, got 64.0"),
        ({"drop_last": 1}, "drop_last: Input should be a valid boolean, got 1"),
        ({"clip_norm": math.nan}, "clip_norm: Input should be"),
        ({"clip_norm": math.inf}, "clip_norm: Input should be a finite number, got inf"),
        ({"workers": {"min": 4, "max": 2}}, "workers: max (2) is less than min (4)"),
        ({"workers": "4:2"}, "workers: max (2) is less than min (4)"),
        ({"workers": 0}, "workers.min: Input should be greater than or equal to 1, got 0"),
        ({"workers": "some"}, "workers: give a number N, a range MIN:MAX or a mapping"),
        ({"workers": True}, "workers: give a number N, a range MIN:MAX or a mapping"),
        (
            {"workers": 5, "shards": 4},
            "workers.max (5) is more than shards (4): a worker needs a shard of its own",
        ),
        ({"max_steps": 3}, "exactly one of epochs and max_steps; got both (epochs 10, max_steps 3"),
        ({"epochs": None}, "exactly one of epochs and max_steps; got neither"),
        ({"mode": "dpp"}, "mode: Input should be 'auto', 'ddp', 'dataparallel' or 'local'"),
        ({"reduction": "fast", "mode": "local"}, "reduction fast exists in mode ddp only"),
        ({"name": "../x"}, "name: String should match pattern"),
        ({"workload": "digits.py"}, "workload: String should match pattern"),
        ({"args": {1: 2}}, "args.1: Input should be a valid string, got 1"),
        ({"args": {"a": {1, 2}}}, "args.a: input was not a valid JSON value, got {1, 2}"),
        ({"args": {"x": [math.nan]}}, "args.x.0: Input should be a finite number, got nan"),
        ({"args": {"list": {"float": {1}}}}, "args.list.float: input was not a valid JSON value"),
        ({"storage": ""}, "storage: String should have at least 1 character"),
        ({"storage": " "}, "storage: String should match pattern"),
        ({"checkpoint": 3}, "checkpoint: Input should be a valid dictionary"),
        (
            {"checkpoint": {"keep": 0}},
            "checkpoint.keep: Input should be greater than or equal to 1, got 0",
        ),
        ({"checkpoint": {"best": {"metric": "a", "order": "up"}}}, "best.order: Input should be"),
        ({"ema": {"decay": 1}}, "ema.decay: Input should be less than 1, got 1"),
        ({"early_stop": {"patience": 0}}, "early_stop.patience: Input should be greater than"),
        (
            {"early_stop": {"metric": "a"}, "evaluate": {"every_epochs": 0}},
            "early_stop.metric is 'a', but evaluate.every_epochs and evaluate.every_steps are 0",
        ),
        ({"init_from": 3}, "init_from: give a path or a mapping {path: PATH, strict: true}, got 3"),
        (
            {"init_from": {"path": "a", "checkpoint": "old"}},
            "init_from.checkpoint: give latest, best or a number of steps, got 'old'",
        ),
        ({"init_from": {"checkpoint": True}}, "give latest, best or a number of steps, got True"),
        (
            {"gradient_accumulation_steps": 4},
            "gradient_accumulation_steps: unknown field; gradients are accumulated wherever there "
            "are more shards than workers: set shards",
        ),
    ],
)
def test_a_bad_field_is_refused_with_path_value_and_what_is_allowed(
    fields: dict[str, Any], message: str
) -> None:
    assert message in refusal(**fields)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(SpecError, match="batch_size: required, but not given"):
        parse_spec({"workload": "digits:Digits", "epochs": 1})


def test_every_problem_is_told_at_once() -> None:
    lines = refusal(batch_size=0, seed=-1, colour="red").splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["seed", "batch_size", "colour"]


@pytest.mark.parametrize("data", [None, [], "text", 3])
def test_a_spec_that_is_no_mapping_is_refused(data: object) -> None:
    with pytest.raises(SpecError, match=f"must be a mapping of fields, got {type(data).__name__}"):
        parse_spec(data)


# Ways to write the number of workers


@pytest.mark.parametrize(
    ("given", "low", "high"),
    [(3, 3, 3), ("3", 3, 3), ("1:4", 1, 4), ({"min": 2, "max": 3}, 2, 3), ({"max": 4}, 1, 4)],
)
def test_workers_may_be_a_number_a_range_or_a_mapping(given: Any, low: int, high: int) -> None:
    workers = spec(workers=given).workers
    assert (workers.min, workers.max) == (low, high)


# Files and overrides


def write(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text)
    return path


JOB = "workload: digits:Digits\nbatch_size: 64\nepochs: 10\n"


def test_a_job_file_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, JOB + "workers: {min: 1, max: 4}\nargs: {lr: 1e-3}\n")
    loaded = load_spec(path)
    assert loaded.workers.max == 4
    assert loaded.args == {"lr": 0.001}


@pytest.mark.parametrize(
    ("folder", "given", "name"),
    [
        ("mine", "", "mine"),
        ("mine", "name: yours\n", "yours"),
        ("_ray_pkg_0123456789abcdef", "", None),  # the working directory of a submitted job
        ("two words", "", None),
    ],
)
def test_a_job_without_a_name_has_that_of_its_folder_if_it_can_be_one(
    tmp_path: Path, folder: str, given: str, name: str | None
) -> None:
    (tmp_path / folder).mkdir()
    assert load_spec(write(tmp_path / folder, JOB + given)).name == name


def test_a_missing_job_file_is_named_with_where_it_was_looked_for(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "job.yaml"
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert f"can't read the job file {path} (No such file or directory)" in str(caught.value)
    assert f"looked in {path.parent}" in str(caught.value)


def test_a_folder_is_no_job_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"Is a directory"):
        load_spec(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("workers: [1, 2", "is not valid YAML"),
        ("a: b: c", "is not valid YAML"),
        (JOB + "epochs: 3\n", "'epochs' is given twice"),
        ("", "must hold a mapping of fields, got NoneType"),
        ("- 1\n- 2\n", "must hold a mapping of fields, got list"),
    ],
)
def test_a_malformed_job_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(SpecError, match=re.escape(message)) as caught:
        load_spec(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="is not UTF-8 text"):
        load_spec(path)


def test_overrides_take_precedence_at_any_depth(tmp_path: Path) -> None:
    overrides = dict(
        parse_override(text)
        for text in ("workers=1:3", "checkpoint.keep=7", "args.lr=1e-2", "faults.retries={}")
    )
    loaded = load_spec(write(tmp_path, JOB + "workers: 2\nargs: {lr: 0.5, width: 8}\n"), overrides)
    assert (loaded.workers.min, loaded.workers.max) == (1, 3)
    assert loaded.checkpoint.keep == 7
    assert loaded.args == {"lr": 0.01, "width": 8}


def test_an_override_of_an_unknown_field_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"checkpoint\.kep: unknown field; did you mean keep\?"):
        load_spec(write(tmp_path, JOB), {"checkpoint.kep": 1})


def test_an_override_below_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"--set seed\.x: seed is 3, not a mapping"):
        load_spec(write(tmp_path, JOB + "seed: 3\n"), {"seed.x": 1})


@pytest.mark.parametrize("given", [None, 2, "1:3"])
def test_an_override_below_a_short_form_is_understood(tmp_path: Path, given: object) -> None:
    text = JOB if given is None else JOB + f"workers: {given}\n"
    assert load_spec(write(tmp_path, text), {"workers.max": 4}).workers.max == 4


@pytest.mark.parametrize("given", ["checkpoint:\n", "checkpoint: ~\n"])
def test_a_part_left_empty_in_the_file_has_its_defaults(tmp_path: Path, given: str) -> None:
    assert load_spec(write(tmp_path, JOB + given)).checkpoint.keep == 3
    assert load_spec(write(tmp_path, JOB + given), {"checkpoint.keep": 5}).checkpoint.keep == 5


@pytest.mark.parametrize("text", ["seed", "=3", " =3", ""])
def test_an_override_without_path_or_value_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"--set takes a\.b=value, got"):
        parse_override(text)


@pytest.mark.parametrize("path", ["a..b", ".seed", "checkpoint. ", "checkpoint."])
def test_an_override_with_an_empty_name_between_dots_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(SpecError, match="a name is empty between the dots"):
        load_spec(write(tmp_path, JOB), {path: 3})


def test_an_override_that_is_no_yaml_is_refused() -> None:
    with pytest.raises(SpecError, match=r"--set args: '\[1, 2' is not valid YAML"):
        parse_override("args=[1, 2")


# Comparing and writing


def test_differing_fields_names_path_and_both_values() -> None:
    assert differing_fields(spec(), spec(shards=8)) == ["shards: 4 against 8"]


def test_differing_fields_leaves_out_what_may_change_unless_asked() -> None:
    a, b = spec(), spec(workers=3, mode="ddp")
    assert differing_fields(a, b) == []
    assert [line.split(":")[0] for line in differing_fields(a, b, only_bits=False)] == [
        "workers.min",
        "workers.max",
        "mode",
    ]


@pytest.mark.parametrize(("a", "b"), [(1, 1.0), (1, True), (0.0, -0.0)])
def test_arguments_that_are_equal_in_python_but_not_the_same_differ(a: Any, b: Any) -> None:
    assert len(differing_fields(spec(args={"x": a}), spec(args={"x": b}))) == 1


def test_the_order_of_arguments_is_no_difference() -> None:
    a, b = spec(args={"x": 1, "y": 2}), spec(args={"y": 2, "x": 1})
    assert differing_fields(a, b) == []


def test_a_spec_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        spec().seed = 3  # type: ignore[misc]


JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=8),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = re.compile(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,9}\Z")
RATES = st.floats(min_value=1e-12, max_value=1e12)


@st.composite
def specs(draw: st.DrawFn) -> JobSpec:
    low = draw(st.integers(1, 8))
    high = draw(st.integers(low, 9))
    length = draw(st.sampled_from(["epochs", "max_steps"]))
    return parse_spec(
        {
            "workload": draw(st.sampled_from(["digits:Digits", "a.b.c:_D1"])),
            "args": draw(st.dictionaries(st.text(max_size=6), JSON, max_size=4)),
            "name": draw(
                st.one_of(st.none(), st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,9}\Z"))
            ),
            "seed": draw(st.integers(0, 2**63 - 1)),
            "batch_size": draw(st.integers(1, 10**6)),
            "shards": draw(st.integers(high, 4096)),
            length: draw(st.integers(1, 10**6)),
            "workers": {"min": low, "max": high},
            "mode": draw(st.sampled_from(Mode)).value,
            "precision": draw(st.sampled_from(["fp32", "bf16", "fp16"])),
            "clip_norm": draw(st.one_of(st.none(), RATES)),
            "storage": draw(st.text(min_size=1, max_size=12).filter(str.strip)),
            "faults": {"hang_timeout_s": draw(RATES)},
            "numerics": {"cpu_capability": draw(st.sampled_from([None, "default", "avx2"]))},
        }
    )


@given(specs())
def test_a_spec_written_as_yaml_is_read_back_without_a_difference(
    tmp_path_factory: pytest.TempPathFactory, original: JobSpec
) -> None:
    path = tmp_path_factory.mktemp("job") / "job.yaml"
    path.write_text(dump_spec(original), encoding="utf-8")
    again = load_spec(path)
    named = original.model_copy(update={"name": original.name or path.parent.name})
    assert again == named
    assert differing_fields(named, again, only_bits=False) == []


def test_a_spec_is_validated_when_its_own_dump_is_parsed() -> None:
    assert parse_spec(spec(workers="1:2").model_dump(mode="json")) == spec(workers="1:2")


def test_the_short_form_of_init_from_is_its_path(tmp_path: Path) -> None:
    assert spec(init_from="runs/a").init_from == spec(init_from={"path": "runs/a"}).init_from
    assert spec(init_from=None).init_from.path is None
    job = tmp_path / "job.yaml"
    job.write_text("workload: m:C\nbatch_size: 4\nepochs: 1\ninit_from: a\n", encoding="utf-8")
    read = load_spec(job, {"init_from.strict": False})
    assert (read.init_from.path, read.init_from.strict) == ("a", False)


@pytest.mark.parametrize(
    ("path", "storage", "uri"),
    [
        ("a", "/data/runs", "/data/runs/a"),
        ("a", "s3://bucket/runs/", "s3://bucket/runs/a"),
        ("s3://other/b", "/data/runs", "s3://other/b"),
        ("/x/b", "/data/runs", "/x/b"),
        ("./b", "/data/runs", str(Path("b").absolute())),
        ("a", "runs", str(Path("runs/a").absolute())),
    ],
)
def test_a_source_without_a_slash_is_a_run_in_storage(path: str, storage: str, uri: str) -> None:
    made = spec(init_from=path)
    assert source_uri(made.init_from, storage) == uri
    assert source_uri(spec(init_from=uri).init_from, storage) == uri


@pytest.mark.parametrize("alias", ["latest", "LATEST", "v9", "a b", ""])
def test_an_alias_that_mlflow_keeps_for_itself_is_refused(alias: str) -> None:
    assert "tracking.alias" in refusal(tracking={"registered_model": "m", "alias": alias})


@pytest.mark.parametrize("name", ["a/b", "a:b", "", " a"])
def test_a_name_that_no_registered_model_can_have_is_refused(name: str) -> None:
    assert "tracking.registered_model" in refusal(tracking={"registered_model": name})
