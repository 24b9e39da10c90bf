"""Strict settings for every test: shapes checked at run time, no silent promotion, JAX on the CPU if not told."""

import gc
import os

# Warpgroups of an interpreted kernel wait for each other inside callbacks, each on a thread of XLA's pool, which has
# one a core: with two cores none may be left for the one that the others wait for.
os.environ.setdefault("NPROC", "16")
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX is imported; set it to test on an accelerator

# Tests compile far more than they compute. Without LLVM's optimisations, without emitting kernels through MLIR, and
# with all kernels of a program in one module, compiling takes a fifth of the time. The price: a loop copies every array
# that it stacks up at each of its steps, so tests should not step through many hundreds of tokens.
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ["XLA_FLAGS"] = (
        "--xla_backend_optimization_level=0 "
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
        "--xla_cpu_parallel_codegen_split_count=1 "
    ) + os.environ.get("XLA_FLAGS", "")

import jax
import jaxtyping
import pytest
from processes import compiled_programs

# Must stand before the first import of the packages: every annotated function is checked from here on.
jaxtyping.install_import_hook(["eflax", "experiments"], "beartype.beartype")

# Flax's Linear, Conv, Embed and its float32 norms work under both settings, and so does Orbax. What cannot:
# optax's Adam and its cosine schedules (a float to the power of an integer count), clipping of gradients of
# several dtypes, and Flax's norms on bfloat16. Code that calls these does it inside
# `with jax.numpy_dtype_promotion("standard"):`, so that it also serves a user who is as strict.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Leave neighbours on one worker, where they share runs and programs, until the other one is idle."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_collection_finish():
    """Leave what was imported to itself, and look for garbage less often: tracing makes millions of objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


@pytest.fixture(autouse=True, scope="module")
def free_compiled_programs():
    """Drop what a module compiled: some thousand programs use up a process's memory maps, and XLA then crashes."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="module")
def compiled_once():
    """Let the runs of a module share what they compile, with each other and with the processes that they start."""
    options = {
        "jax_compilation_cache_dir": compiled_programs(),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def without_shape_checks():
    """Let ill-shaped arguments through, so that the project's own error messages can be tested."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture
def float64():
    """Run the test with 64-bit types enabled."""
    with jax.enable_x64(True):
        yield


def pytest_terminal_summary(terminalreporter):
    """List every skipped test with its reason: a skip that nobody sees is a test that nobody has."""
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.section(f"{len(skipped)} skipped")
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        terminalreporter.write_line(f"{report.nodeid}: {str(reason).removeprefix('Skipped: ')}")
