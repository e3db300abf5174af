"""The end of a save: documents, then names, then the one act that makes the snapshot exist."""

from __future__ import annotations

from waypost.errors import CommitUnknownError, NotFoundError, StorageError, WaypostError
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
