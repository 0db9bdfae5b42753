"""Whether a recorder may write its run: it holds the run's lease, or its caller does."""

from __future__ import annotations

from samestep.checkpoint.storage import Storage
from samestep.errors import RecorderError, StorageError
from samestep.telemetry import lease as leases


class Tenure:
    """The right to write a run.

    Args:
        run: the run directory.
        take: take the lease; False where the caller holds it.

    Raises:
        RunInUseError: another live recorder holds it.
    """

    def __init__(self, run: Storage, *, take: bool) -> None:
        self._uri = run.uri
        self._lease = leases.acquire(run) if take else None

    @property
    def is_lost(self) -> bool:
        """Another process has taken the run over."""
        return self._lease is not None and self._lease.lost

    def holds(self) -> bool:
        """Whether the run may be written now."""
        return self._lease is None or self._lease.held()

    def surely_holds(self) -> bool:
        """As `holds`, and False where storage can't tell.

        For what is done when a recorder ends: left undone, the next start makes up for it; done to
        a run that is another's, nothing does.
        """
        try:
            return self.holds()
        except StorageError:
            return False

    def require(self) -> None:
        """Refuses to go on where it may not.

        Raises:
            RecorderError: the lease is lost or given back.
        """
        if self.is_lost:
            raise RecorderError(
                f"the lease of {self._uri} is lost: another process goes on with this run; "
                "nothing more is written from here"
            )
        if not self.holds():
            raise RecorderError(f"this recorder of {self._uri} is closed; make a new one")

    def release(self) -> None:
        """Gives the lease back."""
        if self._lease is not None:
            self._lease.release()
