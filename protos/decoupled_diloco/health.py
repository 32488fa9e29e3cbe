"""``diloco-health``: whether a process is well, for container engines and other supervisors.

It imports neither torch nor our protos: an engine runs it every few seconds.
"""

from __future__ import annotations

import time
from pathlib import Path

import click

from decoupled_diloco.config import cli_errors
from decoupled_diloco.errors import EXIT_OK, DilocoError, Reason, UsageError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Say whether a process of Decoupled DiLoCo is well: exit code 0, or one line that says why."""


@cli.command()
@click.argument("address")
@click.option("--timeout", type=float, default=3.0, show_default=True, help="seconds to wait")
def serving(address: str, timeout: float) -> int:
    """Ask the health service at ADDRESS (host:port) of a synchronizer."""
    check_serving(address, timeout_s=timeout)
    return EXIT_OK


@cli.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--name", help="id of the learner, or evaluator")
@click.option(
    "--name-file", type=click.Path(path_type=Path), help="file that holds it (--learner-id-file)"
)
@click.option(
    "--max-age", type=float, default=0.0, show_default=True, help="seconds; 0 takes any age"
)
def writing(run_dir: Path, name: str | None, name_file: Path | None, max_age: float) -> int:
    """Look whether a process writes its metrics below RUN_DIR: a learner does at every step."""
    if (name is None) == (name_file is None):
        raise UsageError(Reason.CONFIG_CONFLICT, "give --name or --name-file, one of them")
    if name_file is not None:
        try:
            name = name_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise _unwell(f"{name_file} cannot be read yet ({error})") from error
    check_writing(run_dir / "metrics" / f"{name}.jsonl", max_age_s=max_age, now=time.time())
    return EXIT_OK


def check_serving(address: str, *, timeout_s: float) -> None:
    """Asks a gRPC health service.

    Args:
        address: host:port; plaintext.
        timeout_s: longest wait for the answer.

    Raises:
        UsageError: CONFIG_INVALID for no address.
        DilocoError: UNAVAILABLE where nobody answers in time, or not ``SERVING``.
    """
    import grpc
    from grpc_health.v1 import health_pb2

    from decoupled_diloco.channel import channel_options, parse_address

    target = parse_address(address)
    with grpc.insecure_channel(str(target), options=channel_options(target, "health")) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise _unwell(f"{target} does not answer: {error.code().name}") from error
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        word = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        raise _unwell(f"{target} answers {word}")


def check_writing(path: Path, *, max_age_s: float, now: float) -> None:
    """Looks when a file was written last.

    Args:
        path: the file.
        max_age_s: longest time since then; 0 takes any.
        now: wall clock, seconds since the epoch.

    Raises:
        DilocoError: UNAVAILABLE where it is missing or too old.
    """
    try:
        age_s = now - path.stat().st_mtime
    except OSError as error:
        raise _unwell(f"{path} cannot be read yet ({error.strerror})") from error
    if max_age_s and age_s > max_age_s:
        raise _unwell(f"{path} was written {age_s:.0f} s ago, at most {max_age_s:.0f} s are usual")


def _unwell(message: str) -> DilocoError:
    return DilocoError(Reason.UNAVAILABLE, message)


@cli_errors
def main() -> object:
    """Runs the command line."""
    return cli.main(standalone_mode=False)


if __name__ == "__main__":
    main()
