"""A pinned file of a dataset on the Hugging Face hub: from the cache when it is there, downloaded otherwise.

The hub's own cache and its HF_* settings apply. ``DataUnreachable`` is raised when the hub cannot be talked to, so that
a caller with a shipped replacement can tell it from a refusal.
"""

from __future__ import annotations

from pathlib import Path

from deepinfer_engine.errors import NotReadyError
from deepinfer_engine.evals.task import Data

_BY_FILE = "give the questions with --data FILE.jsonl|csv|parquet"


class DataUnreachable(NotReadyError):
    """The hub cannot be reached and the file is not in the cache."""


def access_page(repo: str) -> str:
    """Where the terms of a gated dataset are accepted."""
    return f"https://huggingface.co/datasets/{repo}"


def cached(data: Data) -> Path | None:
    """The pinned file if it is in the hub's cache; nothing is asked over the network."""
    from huggingface_hub import errors as hub_errors
    from huggingface_hub import hf_hub_download

    assert data.hub is not None and data.revision is not None
    try:
        path = hf_hub_download(data.hub, data.file, repo_type="dataset", revision=data.revision, local_files_only=True)
    except hub_errors.LocalEntryNotFoundError:
        return None
    return Path(path)


def fetch(data: Data) -> Path:
    """Local path of the pinned file. ``NotReadyError`` (exit 3) names the access page or ``--data``.

    A gated repository is asked for access first, so that a refusal costs no download and no model load.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub import errors as hub_errors

    assert data.hub is not None and data.revision is not None
    name = f"{data.hub}@{data.revision[:8]}:{data.file}"
    path = cached(data)
    if path is not None:
        return path
    try:
        _touch()
        if data.gated:
            HfApi().auth_check(data.hub, repo_type="dataset")
        return Path(hf_hub_download(data.hub, data.file, repo_type="dataset", revision=data.revision))
    except (hub_errors.GatedRepoError, hub_errors.RepositoryNotFoundError) as exc:
        page = access_page(data.hub)
        if data.gated:
            raise NotReadyError(
                f"{name}: gated, and this account has no access",
                hint=f"accept the terms at {page}, then hf auth login; or {_BY_FILE}",
            ) from None
        raise NotReadyError(f"{name}: {_first_line(exc)}", hint=f"see {page}, or {_BY_FILE}") from None
    except (hub_errors.RevisionNotFoundError, hub_errors.RemoteEntryNotFoundError) as exc:
        raise NotReadyError(f"{name}: {_first_line(exc)}", hint=_BY_FILE) from None
    except hub_errors.HfHubHTTPError as exc:
        raise DataUnreachable(f"{name}: the hub refused: {_first_line(exc)}", hint=_BY_FILE) from None
    except (hub_errors.LocalEntryNotFoundError, *_network_errors()) as exc:
        raise DataUnreachable(f"{name}: the hub cannot be reached: {_first_line(exc)}", hint=_BY_FILE) from None


def _touch() -> None:
    """One short request to the hub: without a network its client would retry for half a minute."""
    from huggingface_hub import constants, get_session

    get_session().head(constants.ENDPOINT, timeout=10)


def _network_errors() -> tuple[type[Exception], ...]:
    """What the hub client raises without a network or in its offline mode."""
    import httpx2
    from huggingface_hub.errors import OfflineModeIsEnabled

    return httpx2.HTTPError, OfflineModeIsEnabled, ConnectionError, TimeoutError


def _first_line(exc: Exception) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return lines[0] if lines else type(exc).__name__
