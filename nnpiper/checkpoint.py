"""Checkpoints: the network's plain tensors in one file, a card (JSON) with its SHA-256 and its history beside it."""

import hashlib
import io
import json
import pickle
from dataclasses import asdict
from pathlib import Path

import torch

from .network import Network, Size
from .paths import CHECKPOINT
from .problem import InputError, write_bytes, write_text


def card_path(path: Path) -> Path:
    """Where the card of a checkpoint lies."""
    return Path(path).with_suffix(".json")


def save(network: Network, path: Path, history: dict) -> None:
    """Write checkpoint and card; `history` says how the weights came about (command, steps, seed, minutes, ...)."""
    buffer = io.BytesIO()
    torch.save(network.state_dict(), buffer)
    data = buffer.getvalue()
    write_bytes(path, data)
    card = {"sha256": hashlib.sha256(data).hexdigest(), "size": asdict(network.size), "blind": network.blind, **history}
    write_text(card_path(path), json.dumps(card, indent=2) + "\n")


def load(path: Path | None = None) -> Network:
    """The network of a checkpoint (None: the shipped one), ready to solve. Raises InputError where a file is missing or
    the SHA-256 is not the card's; nothing is unpickled before that."""
    path = Path(path or CHECKPOINT)
    try:
        card = json.loads(card_path(path).read_text(encoding="utf-8"))
        data = path.read_bytes()
        wanted, size, blind = card["sha256"], Size(**card["size"]), card["blind"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: checkpoint or its card cannot be read: {error}; "
                         "allowed: a file written by `nnpiper train`") from None
    found = hashlib.sha256(data).hexdigest()
    if found != wanted:
        raise InputError(f"{path}: SHA-256 {found}; allowed: {wanted}, as its card says")
    try:
        network = Network(size, blind)
        network.load_state_dict(torch.load(io.BytesIO(data), weights_only=True))
    except (pickle.UnpicklingError, EOFError, RuntimeError, TypeError) as error:
        raise InputError(f"{path}: {first_line(error)}; allowed: the tensors of a {size}") from None
    return network.eval().requires_grad_(False)


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its name where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
