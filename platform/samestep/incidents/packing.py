"""A bundle as one file, and back: an uncompressed zip archive whose bytes follow from the bundle.

What is unpacked is checked against that rule as well: an archive that `pack` would not have made,
byte for byte, is refused. So there is nothing in it but the files of a bundle: no link, no path
that leads elsewhere, no name twice, nothing between the members, nothing that grows.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from samestep import names
from samestep.checkpoint.storage import Storage
from samestep.errors import BundleError, InputError, StorageError
from samestep.incidents.archive import MODE, SYSTEM_UNIX, Archive, Sink
from samestep.incidents.bundle import MAX_FILES, MAX_MANIFEST_BYTES, Bundle, is_path
from samestep.incidents.bundle_folder import PART_BYTES, read_bundle, verify_bundle

_ODD: Final = (zipfile.BadZipFile, RuntimeError, EOFError, ValueError, LookupError, ArithmeticError)
"""What `zipfile` raises on archives that are damaged or odd."""


def pack(folder: Storage, target: Path) -> Bundle:
    """Writes a bundle, after verifying it, as one file; the same bundle gives the same bytes.

    Args:
        folder: of the bundle.
        target: the file; it must not exist, and appears whole or not at all.

    Raises:
        BundleError: the bundle is damaged.
        InputError: the target exists, or can't be written.
        StorageError: storage can't be read.
    """
    if os.path.lexists(target):
        raise InputError(f"{target} exists already: give another --out, or remove it first")
    bundle = verify_bundle(folder)
    temporary = target.parent / f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    with _explained(target):
        try:
            with open(temporary, "xb") as file:
                _write(file, folder, bundle)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    return bundle


def unpack(source: Path, target: Path) -> Bundle:
    """Makes a folder out of what `pack` wrote, and verifies it.

    Args:
        source: the file.
        target: the folder, new or empty. Where anything is wrong, what was written stays behind
            for the caller to remove.

    Raises:
        BundleError: the file is damaged, or no packed bundle.
        InputError: it can't be read, or the folder is not empty.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target} is not empty: unpack into a new folder")
    with _explained(source):
        target.mkdir(parents=True, exist_ok=True)
        with _opened(source) as (archive, size_bytes):
            _extract(archive, size_bytes, target)
    folder = Storage.at(str(target))
    bundle = verify_bundle(folder)
    rebuilt = _Hashing()
    _write(rebuilt, folder, bundle)
    with _explained(source), open(source, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if rebuilt.digest.hexdigest() != found:
        raise BundleError(f"{source} holds more than a bundle's files, or was altered")
    return bundle


def is_packed(path: Path) -> bool:
    """Whether a path is a file that may be a packed bundle; its content is not trusted for it."""
    return path.is_file() and zipfile.is_zipfile(path)


class _Hashing:
    """A file that is hashed, not kept."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> None:
        self.digest.update(data)


def _write(sink: Sink, folder: Storage, bundle: Bundle) -> None:
    """The archive: `bundle.json`, then the files in order of their names."""
    archive = Archive(sink)
    archive.add(
        names.BUNDLE_FILE, folder.size_bytes(names.BUNDLE_FILE), _parts(folder, names.BUNDLE_FILE)
    )
    for name in sorted(bundle.files):
        archive.add(name, bundle.files[name].num_bytes, _parts(folder, name))
    archive.close()


def _parts(folder: Storage, name: str) -> Iterator[bytes]:
    start = 0
    while data := folder.read_part(name, start, PART_BYTES):
        yield data
        start += len(data)


@contextmanager
def _opened(source: Path) -> Iterator[tuple[zipfile.ZipFile, int]]:
    try:
        with zipfile.ZipFile(source) as archive:
            yield archive, source.stat().st_size
    except (*_ODD, struct.error) as error:
        raise BundleError(f"{source} is no packed bundle: {error}") from error


def _extract(archive: zipfile.ZipFile, size_bytes: int, target: Path) -> None:
    """Writes the members; all of them are looked at before the first is read."""
    members = archive.infolist()
    if len(members) > MAX_FILES:
        raise BundleError(f"{archive.filename} has {len(members)} members, more than any bundle")
    found: set[str] = set()
    for info in members:
        _require_plain(info, archive.filename)
        if info.filename in found:
            raise BundleError(f"{archive.filename} has {info.filename!r} twice")
        found.add(info.filename)
    if sum(info.file_size for info in members) > size_bytes:
        raise BundleError(f"{archive.filename} would unpack to more than its own size")
    if names.BUNDLE_FILE not in found:
        raise BundleError(f"{archive.filename} is no packed bundle: no {names.BUNDLE_FILE} in it")
    for info in members:
        path = target.joinpath(*info.filename.split("/"))
        path.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(info) as member, open(path, "xb") as file:
            left = info.file_size
            while left and (data := member.read(min(left, PART_BYTES))):
                file.write(data)
                left -= len(data)
    read_bundle(Storage.at(str(target)))


def _require_plain(info: zipfile.ZipInfo, archive: str | None) -> None:
    name = info.filename
    if not (name == names.BUNDLE_FILE or is_path(name)) or name != info.orig_filename:
        raise BundleError(f"{archive} has the member {name[:200]!r}, which is no file of a bundle")
    if info.external_attr != MODE or info.create_system != SYSTEM_UNIX:
        raise BundleError(f"{archive}: {name} is not marked as a plain file")
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise BundleError(f"{archive}: {name} is compressed; a packed bundle never is")
    if info.flag_bits & 0x1:
        raise BundleError(f"{archive}: {name} is encrypted")
    if name == names.BUNDLE_FILE and info.file_size > MAX_MANIFEST_BYTES:
        raise BundleError(f"{archive}: {name} is too long to be one")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise InputError(f"can't read or write {path}: {error.strerror or error}") from error
