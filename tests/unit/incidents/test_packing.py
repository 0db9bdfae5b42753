from __future__ import annotations

import stat
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samestep.checkpoint.storage import Storage
from samestep.errors import BundleError, InputError, SamestepError
from samestep.incidents.packing import is_packed, pack, unpack
from samestep.replay.bundle_source import BundleSource, unpacked


@pytest.fixture
def packed(whole_bundle: Storage, tmp_path: Path) -> Path:
    target = tmp_path / "bundle.zip"
    pack(whole_bundle, target)
    return target


def test_a_packed_bundle_is_the_same_bytes_each_time_and_unpacks_to_the_same_files(
    whole_bundle: Storage, packed: Path, tmp_path: Path
) -> None:
    assert is_packed(packed)
    bundle = unpack(packed, tmp_path / "folder")
    for name in ("bundle.json", *bundle.files):
        assert (tmp_path / "folder" / name).read_bytes() == whole_bundle.read(name)
    pack(Storage.at(str(tmp_path / "folder")), tmp_path / "again.zip")
    assert (tmp_path / "again.zip").read_bytes() == packed.read_bytes()
    with unpacked(packed) as folder:
        assert BundleSource(folder).bundle == bundle
        assert not folder.root.startswith(str(tmp_path))
    assert not Path(folder.root).exists()


def test_a_file_that_is_there_is_never_replaced(whole_bundle: Storage, packed: Path) -> None:
    before = packed.read_bytes()
    with pytest.raises(InputError, match="exists already"):
        pack(whole_bundle, packed)
    assert packed.read_bytes() == before
    with pytest.raises(InputError, match="is not empty"):
        unpack(packed, packed.parent)


def test_a_damaged_bundle_is_not_packed(whole_bundle: Storage, packed: Path) -> None:
    unpack(packed, packed.parent / "folder")
    (packed.parent / "folder" / "spec.yaml").write_text("x")
    with pytest.raises(BundleError, match=r"spec\.yaml"):
        pack(Storage.at(str(packed.parent / "folder")), packed.parent / "other.zip")
    assert [path.name for path in packed.parent.iterdir() if path.is_file()] == ["bundle.zip"]


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_change_of_a_packed_bundle_is_refused(
    whole_bundle: Storage, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("packed")
    source = folder / "bundle.zip"
    pack(whole_bundle, source)
    before = source.read_bytes()
    # Headers are a small part of the bytes, and the part that matters.
    starts = [at for at in range(len(before) - 4) if before[at : at + 2] == b"PK"]
    near = st.builds(lambda a, b: min(a + b, len(before) - 1), st.sampled_from(starts),
                     st.integers(0, 60))  # fmt: skip
    place = data.draw(near | st.integers(0, len(before) - 1))
    match data.draw(st.sampled_from(["flip", "insert", "delete", "truncate", "append"])):
        case "flip":
            flipped = before[place] ^ (1 << data.draw(st.integers(0, 7)))
            after = before[:place] + bytes([flipped]) + before[place + 1 :]
        case "insert":
            after = before[:place] + data.draw(st.binary(min_size=1, max_size=4)) + before[place:]
        case "delete":
            after = before[:place] + before[place + 1 :]
        case "truncate":
            after = before[:place]
        case "append":
            after = before + data.draw(st.binary(min_size=1, max_size=4))
    source.write_bytes(after)
    with pytest.raises(SamestepError):
        unpack(source, folder / "out")
    assert sorted(path.name for path in folder.iterdir()) in (
        ["bundle.zip"],
        ["bundle.zip", "out"],
    )


def member(name: str, **fields: Any) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    info.create_system, info.external_attr = 3, 0o100644 << 16
    for key, value in fields.items():
        setattr(info, key, value)
    return info


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (member("../outside"), "no file of a bundle"),
        (member("/outside"), "no file of a bundle"),
        (member("code/../../outside"), "no file of a bundle"),
        (member("code/.hidden"), "no file of a bundle"),
        (member("code\\..\\outside.py"), "no file of a bundle"),
        (member("state/"), "no file of a bundle"),
        (member("step.json", external_attr=(stat.S_IFLNK | 0o777) << 16), "plain file"),
        (member("step.json", external_attr=(stat.S_IFCHR | 0o644) << 16), "plain file"),
        (member("step.json", create_system=0), "plain file"),
        (member("spec.yaml"), "twice"),
        (member("step.json", compress_type=zipfile.ZIP_DEFLATED), "compressed"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_an_odd_member_is_refused_and_nothing_is_written_elsewhere(
    whole_bundle: Storage, tmp_path: Path, info: zipfile.ZipInfo, message: str
) -> None:
    source = tmp_path / "in" / "bundle.zip"
    source.parent.mkdir()
    with zipfile.ZipFile(source, "w") as archive:
        for name in ("bundle.json", "spec.yaml"):
            archive.writestr(member(name), whole_bundle.read(name))
        archive.writestr(info, b"a" * 100_000)
    with pytest.raises(BundleError, match=message):
        unpack(source, tmp_path / "in" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert sorted(path.name for path in source.parent.iterdir()) in (
        ["bundle.zip"],
        ["bundle.zip", "out"],
    )


def test_a_bomb_is_refused_before_it_is_read(tmp_path: Path) -> None:
    source = tmp_path / "bomb.zip"
    with zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(
            member("bundle.json", compress_type=zipfile.ZIP_DEFLATED), b"0" * (1 << 26)
        )
    assert source.stat().st_size < 1 << 20
    with pytest.raises(BundleError, match="is compressed; a packed bundle never is"):
        unpack(source, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_another_file_is_no_packed_bundle(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"PK, or so")
    assert not is_packed(tmp_path / "x")
    with pytest.raises(BundleError, match="is no packed bundle"):
        unpack(tmp_path / "x", tmp_path / "out")
    with pytest.raises(InputError, match="No such file"):
        unpack(tmp_path / "missing", tmp_path / "out")
