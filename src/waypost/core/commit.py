"""The end of a save: documents, then names, then the one act that makes the snapshot exist."""

from __future__ import annotations

from waypost import limits
from waypost.errors import (
    CommitUnknownError,
    CorruptionError,
    FormatError,
    NotFoundError,
    StorageError,
    WaypostError,
)
from waypost.format import documents, names
from waypost.format.digests import Algorithm
from waypost.storage import Location


def write_document(
    folder: Location, name: str, data: bytes, algorithm: Algorithm, *, durable: bool
) -> documents.FileRecord:
    """Writes a document of an attempt and returns the record by which the manifest names it."""
    file = folder.storage.create((folder / name).path, len(data), direct=False)
    try:
        file.write(0, [data])
        file.finish(len(data), durable=durable)
    finally:
        file.close()
    path = f"{names.DATA}/{folder.name}/{name}"
    return documents.FileRecord(path=path, bytes=len(data), digest=algorithm.of(data))


def publish_manifest(
    snapshot: Location,
    manifest: documents.Manifest,
    algorithm: Algorithm,
    *,
    replace: bool,
    durable: bool,
) -> bytes:
    """Makes the snapshot exist and returns the manifest's bytes.

    All files that the manifest names must be on the medium, and so must their names.

    Raises:
        AlreadyExistsError: Somebody else committed first, and ``replace`` is false.
        CommitUnknownError: It could not be found out whether the manifest was published.
    """
    data = documents.encode_manifest(manifest, algorithm)
    path = (snapshot / documents.MANIFEST).path
    try:
        snapshot.storage.publish(path, data, replace=replace, durable=durable)
    except StorageError as error:
        if _is_there(snapshot, path, data, error):
            raise CommitUnknownError(
                f"{snapshot.url}: the manifest is there, but the storage reported an error "
                f"({error}); whether it survives a power cut is unknown. Nothing was removed"
            ) from error
        raise
    return data


def _is_there(snapshot: Location, path: str, data: bytes, cause: StorageError) -> bool:
    """Reads back what was published, since an error may come after the deed."""
    try:
        return snapshot.storage.read(path, len(data)) == data
    except NotFoundError:
        return False
    except StorageError as error:
        raise CommitUnknownError(
            f"{snapshot.url}: whether the manifest was published is unknown ({cause}; then "
            f"{error}). Nothing was removed"
        ) from cause


def remove_tree(folder: Location) -> int:
    """Removes everything below ``folder`` and the folder itself; returns the number of files.

    Links are removed, never followed. Errors about single files do not stop it; the first is raised
    at the end.
    """
    removed = 0
    first: WaypostError | None = None
    for name in folder.storage.list(folder.path):
        try:
            if name.is_folder:
                removed += remove_tree(folder / name.name)
            else:
                removed += folder.storage.remove((folder / name.name).path)
        except StorageError as error:
            first = first or error
    if first is not None:
        raise first
    folder.storage.remove_folder(folder.path)
    return removed


def discard_attempt(snapshot: Location, attempt: str) -> None:
    """Removes what an attempt wrote, and folders that it alone had filled."""
    remove_tree(snapshot / names.DATA / attempt)
    if snapshot.storage.remove_folder((snapshot / names.DATA).path) and snapshot.path:
        snapshot.storage.remove_folder(snapshot.path)


def sweep_attempts(snapshot: Location, *, dry_run: bool = False) -> list[str]:
    """Removes the folders of attempts that failed or were replaced; returns their URLs.

    An attempt holds the lock of its folder until it is committed or given up, so one that is still
    going on is left alone, whoever makes it.
    """
    data = snapshot / names.DATA
    found: list[str] = []
    for name in snapshot.storage.list(data.path):
        if not name.is_folder or not names.ATTEMPT.fullmatch(name.name):
            continue
        folder = data / name.name
        if committed_attempt(snapshot) == name.name:
            continue
        lock = None if dry_run else snapshot.storage.lock(folder.path)
        if lock is None and not dry_run:
            continue
        try:
            if committed_attempt(snapshot) != name.name:
                found.append(folder.url)
                if not dry_run:
                    remove_tree(folder)
        finally:
            if lock is not None:
                lock.release()
    return found


def committed_attempt(snapshot: Location) -> str | None:
    """Returns the attempt that the manifest names, or None when there is no valid manifest."""
    path = (snapshot / documents.MANIFEST).path
    try:
        data = snapshot.storage.read(path, limits.MANIFEST_BYTES_MAX)
        return documents.decode_manifest(data, snapshot.url).attempt
    except (NotFoundError, CorruptionError, FormatError):
        return None
