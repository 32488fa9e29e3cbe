"""Settings of a run on the wire: what the synchronizer serves."""

from __future__ import annotations

from decoupled_diloco.codecs import check_codecs
from decoupled_diloco.settings import RunSettings
from decoupled_diloco.v1 import types_pb2


def settings_to_proto(settings: RunSettings) -> types_pb2.RunSettings:
    """The part of the settings that learners need."""
    return types_pb2.RunSettings(
        run_id=settings.run_id,
        num_fragments=settings.num_fragments,
        sync_interval=settings.sync_interval,
        overlap=settings.overlap,
        quorum=settings.quorum,
        num_learners=settings.num_learners,
        strategy=settings.strategy,
        codec_up=settings.codec_up,
        codec_down=settings.codec_down,
        total_global_steps=settings.total_global_steps,
        heartbeat_timeout_seconds=settings.heartbeat_timeout_s,
        heartbeat_interval_seconds=settings.heartbeat_interval_s,
        push_timeout_seconds=settings.push_timeout_s,
        trainer_json=settings.trainer_json,
        lease_timeout_seconds=settings.lease_timeout_s,
        data=settings.data_mode,
        data_length=settings.data_length,
        data_lease_length=settings.data_lease_length,
    )


def settings_from_proto(message: types_pb2.RunSettings) -> RunSettings:
    """Reads served settings; what learners do not need keeps its default.

    Raises:
        UsageError: where the message holds settings that cannot be.
    """
    settings = RunSettings(
        run_id=message.run_id,
        num_fragments=message.num_fragments,
        sync_interval=message.sync_interval,
        overlap=message.overlap,
        quorum=message.quorum,
        num_learners=message.num_learners,
        strategy=message.strategy,
        codec_up=message.codec_up,
        codec_down=message.codec_down,
        total_global_steps=message.total_global_steps,
        heartbeat_timeout_s=message.heartbeat_timeout_seconds,
        heartbeat_interval_s=message.heartbeat_interval_seconds,
        push_timeout_s=message.push_timeout_seconds,
        push_floor_s=min(message.push_timeout_seconds, 1.0),
        trainer_json=message.trainer_json,
        lease_timeout_s=message.lease_timeout_seconds,
        data_mode=message.data,
        data_length=message.data_length,
        data_lease_length=message.data_lease_length,
    )
    check_codecs(settings)
    return settings
