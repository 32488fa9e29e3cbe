"""``diloco version``: versions of the project and of what its numbers depend on."""

from __future__ import annotations

import importlib.metadata
import platform

import click

_PACKAGES = ("decoupled-diloco", "torch", "grpcio", "protobuf", "safetensors", "redis")


@click.command()
def command() -> None:
    """Print the versions of diloco and of what it builds on."""
    for package in _PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        click.echo(f"{package} {version}")
    click.echo(f"python {platform.python_version()}")
