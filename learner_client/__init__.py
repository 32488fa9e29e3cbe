"""Train a PyTorch model as one learner of a Decoupled DiLoCo fleet.

See ``Learner``. Everything else here is what its arguments and results are made of.
"""

from __future__ import annotations

from learner_client.core.connection import Change, State
from learner_client.core.leadership import Move
from learner_client.data import DataStatus, LeasedData, epoch_order
from learner_client.errors import DilocoError, Reason, UsageError
from learner_client.inner_state import InnerState, OptimizerState
from learner_client.learner import Learner
from learner_client.metrics import serve_metrics
from learner_client.overhead import Overhead
from learner_client.parameters import ModuleParameters, Parameters
from learner_client.run_info import fetch_settings, wait_for_settings
from learner_client.runtime import Runtime
from learner_client.snapshots import SnapshotDirectory
from learner_client.status import LearnerStatus
from learner_client.training_state import (
    SavedLearner,
    TrainingState,
    load_training_state,
    save_training_state,
)

__all__ = [
    "Change",
    "DataStatus",
    "DilocoError",
    "InnerState",
    "Learner",
    "LearnerStatus",
    "LeasedData",
    "ModuleParameters",
    "Move",
    "OptimizerState",
    "Overhead",
    "Parameters",
    "Reason",
    "Runtime",
    "SavedLearner",
    "SnapshotDirectory",
    "State",
    "TrainingState",
    "UsageError",
    "epoch_order",
    "fetch_settings",
    "load_training_state",
    "save_training_state",
    "serve_metrics",
    "wait_for_settings",
]
