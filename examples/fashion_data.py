"""Fashion-MNIST as tensors, from wherever it can be had.

Looked for in this order; the first place that has all four files wins:

    1. /usr/share/datasets/fashion-mnist       the Debian and Ubuntu package dataset-fashion-mnist, installed
    2. $PACELINE_DATA                          the cache (default: ~/.cache/paceline/fashion-mnist)
    3. apt-get download dataset-fashion-mnist  unpacked into the cache; needs no root
    4. the data set's own addresses            downloaded into the cache

Checksums are of the contents, not of the .gz files, which differ from one packager to the next.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import secrets
import shutil
import subprocess
import tempfile
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

PACKAGE = "dataset-fashion-mnist"
INSTALLED = Path("/usr/share/datasets/fashion-mnist")
ADDRESSES = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
)
SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
MEAN, STD = 0.2860, 0.3530

Files = dict[str, bytes]


class NotHere(Exception):
    """A place does not have the data; says why."""


def load() -> tuple[TensorDataset, TensorDataset]:
    """The training and the test set: images of 1 × 28 × 28 with mean 0 and variance 1, and labels 0 … 9."""
    files = _find()
    return _dataset(files, "train"), _dataset(files, "t10k")


def cache_folder() -> Path:
    return Path(os.environ.get("PACELINE_DATA") or "~/.cache/paceline/fashion-mnist").expanduser()


def _dataset(files: Files, part: str) -> TensorDataset:
    # idx files: a header of 16 bytes (images) or 8 bytes (labels), then one byte a value
    raw = torch.frombuffer(bytearray(files[f"{part}-images-idx3-ubyte"][16:]), dtype=torch.uint8)
    labels = torch.frombuffer(bytearray(files[f"{part}-labels-idx1-ubyte"][8:]), dtype=torch.uint8)
    images = raw.reshape(-1, 1, 28, 28).float().div_(255).sub_(MEAN).div_(STD)
    return TensorDataset(images, labels.long())


def _find() -> Files:
    cache = cache_folder()
    places: dict[str, Callable[[], Files]] = {
        str(INSTALLED): lambda: _read_folder(INSTALLED),
        str(cache): lambda: _read_folder(cache),
        f"apt-get download {PACKAGE}": lambda: _from_apt(cache),
        **{address: lambda address=address: _download(address, cache) for address in ADDRESSES},
    }
    reasons = []
    for place, read in places.items():
        try:
            return read()
        except (NotHere, OSError, http.client.HTTPException, subprocess.SubprocessError) as error:
            reasons.append(f"  {place}: {error}")
    raise SystemExit(
        "Fashion-MNIST was not found, and could not be fetched:\n" + "\n".join(reasons) + "\n"
        f"Put its four .gz files into {cache} (or another folder, named by PACELINE_DATA), or `apt install {PACKAGE}`."
    )


def _contents(name: str, packed: bytes) -> bytes:
    """The unpacked file, if it is the right one."""
    try:
        data = gzip.decompress(packed)
    except (OSError, EOFError, zlib.error) as error:
        raise NotHere(f"{name}.gz is damaged ({error})") from None
    if hashlib.sha256(data).hexdigest() != SHA256[name]:
        raise NotHere(f"{name}.gz has a wrong checksum")
    return data


def _read_folder(folder: Path) -> Files:
    missing = [f"{name}.gz" for name in SHA256 if not (folder / f"{name}.gz").is_file()]
    if missing:
        raise NotHere("no such folder" if not folder.is_dir() else f"no {', '.join(missing)}")
    return {name: _contents(name, (folder / f"{name}.gz").read_bytes()) for name in SHA256}


def _keep(folder: Path, name: str, packed: bytes) -> None:
    """Into the cache, all or nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{name}.{os.getpid()}.{secrets.token_hex(2)}"
    try:
        temporary.write_bytes(packed)
        os.replace(temporary, folder / f"{name}.gz")
    finally:
        temporary.unlink(missing_ok=True)


def _from_apt(cache: Path) -> Files:
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise NotHere("this machine has no apt-get")
    print(f"Fashion-MNIST: fetching the package {PACKAGE} (31 MB) with apt-get, without installing it", flush=True)
    with tempfile.TemporaryDirectory(prefix="fashion-mnist-") as folder:
        problem = _apt(folder, "download", PACKAGE)
        if problem and os.geteuid() == 0:
            print("Fashion-MNIST: apt-get does not know the package; trying again after apt-get update", flush=True)
            problem = _apt(folder, "update") or _apt(folder, "download", PACKAGE)
        if problem:
            raise NotHere(f"{problem} (`apt-get update` may help)")
        package = next(Path(folder).glob("*.deb"))
        subprocess.run(["dpkg", "-x", str(package), folder], check=True, capture_output=True, timeout=60)
        unpacked = Path(folder, *INSTALLED.parts[1:])
        files = _read_folder(unpacked)
        for name in files:
            _keep(cache, name, (unpacked / f"{name}.gz").read_bytes())
    print(f"Fashion-MNIST: kept in {cache}", flush=True)
    return files


def _apt(folder: str, *arguments: str) -> str | None:
    """What went wrong, if anything."""
    # root's apt-get changes to a user who may not write to the temporary folder, and complains
    command = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    if result.returncode == 0:
        return None
    return (result.stderr.strip() or f"exit {result.returncode}").splitlines()[-1]


def _download(address: str, cache: Path) -> Files:
    files = {}
    for name in SHA256:
        print(f"Fashion-MNIST: downloading {address}/{name}.gz", flush=True)
        with urllib.request.urlopen(f"{address}/{name}.gz", timeout=20) as answer:
            packed = answer.read()
        files[name] = _contents(name, packed)
        _keep(cache, name, packed)
    print(f"Fashion-MNIST: kept in {cache}", flush=True)
    return files
