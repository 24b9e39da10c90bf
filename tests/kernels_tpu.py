"""Runs TPU kernels in JAX's interpreter, and looks for races in each; lowers them for TPUs that are not there."""

import contextlib
from unittest import mock

import jax
from jax._src.pallas.mosaic.interpret import (  # the race detector has no public name
    interpret_pallas_call as interpreter,
)
from jax._src.pallas.mosaic.interpret.race_detection_state import RaceDetectionState
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import device


@contextlib.contextmanager
def interpreted(seed=None):
    """Interpret TPU kernels; fail if any has a race."""
    found = []

    def record(**sizes):  # a new one for each kernel
        found.append(RaceDetectionState(**sizes))
        return found[-1]

    interpreter.reset_tpu_interpret_mode_state()
    with (
        mock.patch.object(interpreter, "RaceDetectionState", record),
        device.interpreted("tpu", detect_races=True, seed=seed),
    ):
        yield
    assert not any(state.races_found for state in found), "a race: the captured output tells where"


@contextlib.contextmanager
def tpu(kind="TPU v5 lite"):
    """Trace and lower programs for TPUs, which need not be there."""
    abstract = AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
        yield
