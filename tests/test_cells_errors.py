"""Wrong input is refused before any work, by an error that names the argument."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from eflax import cells

pytestmark = pytest.mark.usefixtures("without_shape_checks")
QKV = [name for name in oracle.DEFAULTS if harness.has_scale(name)]
WITH_BETA = [name for name in oracle.DEFAULTS if "beta" in oracle.CASES[name].arguments]
GATED = [name for name in oracle.DEFAULTS if "g" in oracle.CASES[name].arguments]


def refuse(case_name, match, error=(ValueError, TypeError), segment_ids=None, edit=None, **keywords):
    """Call the cell with edited inputs and expect an error whose message matches."""
    inputs, _, _ = harness.problem(case_name)
    inputs |= {name: change(inputs[name]) for name, change in (edit or {}).items()}
    with pytest.raises(error, match=match) as raised:
        harness.call(case_name, inputs, segment_ids, **keywords)
    assert "eflax" in str(raised.traceback[-1].path), "the error comes from a library underneath"


def named(*names):
    return "|".join(rf"\b{name}\b" for name in names)


EVERY_ARGUMENT = [
    pytest.param(cell, argument, id=f"{cell}-{argument}")
    for cell in oracle.DEFAULTS
    for argument in oracle.CASES[cell].arguments
]


@pytest.mark.parametrize(("case_name", "argument"), EVERY_ARGUMENT)
def test_rank(case_name, argument):
    refuse(case_name, named(argument), edit={argument: lambda x: x[..., None]})
    refuse(case_name, named(argument), edit={argument: lambda x: x[0]})


@pytest.mark.parametrize(("case_name", "argument"), EVERY_ARGUMENT)
def test_integers(case_name, argument):
    refuse(case_name, named(argument), edit={argument: lambda x: jnp.round(x).astype(jnp.int32)})


@pytest.mark.parametrize(("case_name", "argument"), EVERY_ARGUMENT)
def test_length(case_name, argument):
    """One token too few in one argument; the message may name either of the two that disagree."""
    if argument == "A":
        refuse(case_name, named("A"), edit={"A": lambda x: x[:-1]})
    else:
        others = [name for name in oracle.CASES[case_name].arguments if name != "A"]
        refuse(case_name, named(*others), edit={argument: lambda x: x[:, :-1]})


@pytest.mark.parametrize(("case_name", "argument"), EVERY_ARGUMENT)
def test_batch(case_name, argument):
    if argument != "A":
        others = [name for name in oracle.CASES[case_name].arguments if name != "A"]
        refuse(case_name, named(*others), edit={argument: lambda x: x[:1]})


@pytest.mark.parametrize("case_name", QKV)
def test_head_counts(case_name):
    refuse(case_name, named("v", "k"), edit={"v": lambda x: x[:, :, :3]})  # 3 value heads over 2 key heads
    refuse(case_name, named("q", "k"), edit={"q": lambda x: x[:, :, :1]})
    refuse(case_name, named("q", "k"), edit={"q": lambda x: x[..., :-1]})  # another K


@pytest.mark.parametrize("case_name", WITH_BETA)
def test_beta_has_the_value_heads(case_name):
    refuse(case_name, named("beta"), edit={"beta": lambda x: x[:, :, :2]})


@pytest.mark.parametrize("case_name", GATED)
def test_decay(case_name):
    refuse(case_name, named("g"), edit={"g": lambda x: x[:, :, :2]})
    refuse(case_name, named("g"), edit={"g": lambda x: x.at[0, 3, 1].set(0.25)})
    refuse(
        case_name, named("g"), edit={"g": lambda x: jnp.exp(x)}
    )  # the decay itself in place of its logarithm


@pytest.mark.parametrize("name", ["B", "C"])
def test_selective_state_size(name):
    refuse("selective_ssm", named(name, "A"), edit={name: lambda x: x[..., :-1]})


def test_selective_width():
    refuse("selective_ssm", named("dt", "x"), edit={"dt": lambda x: x[..., :-1]})


@pytest.mark.parametrize("case_name", oracle.DEFAULTS)
def test_initial_state(case_name):
    for change in (
        lambda x: x[:1],
        lambda x: x[..., :-1],
        lambda x: x[..., None],
        lambda x: x.astype(jnp.int32),
    ):
        refuse(
            case_name, named("initial_state"), edit={"initial_state": lambda s, c=change: jax.tree.map(c, s)}
        )
    if case_name == "linear_attention":
        refuse(case_name, named("initial_state"), edit={"initial_state": lambda s: s[0]})
    elif harness.has_scale(case_name):
        refuse(case_name, named("initial_state"), edit={"initial_state": lambda s: jnp.swapaxes(s, -1, -2)})


@pytest.mark.parametrize("case_name", oracle.DEFAULTS)
def test_segment_ids(case_name):
    ids = np.zeros((2, 37), np.int32)
    for wrong in (ids[:1], ids[:, :-1], ids[0], ids[..., None], ids.astype(np.float32)):
        refuse(case_name, named("segment_ids"), segment_ids=jnp.asarray(wrong))
    for wrong in (np.int64(2**32), np.int64(-(2**31) - 1), np.uint32(2**31)):
        refuse(
            case_name,
            r"^segment_ids has ids from .* int32",
            segment_ids=np.full_like(ids, wrong, wrong.dtype),
        )


@pytest.mark.parametrize("case_name", oracle.DEFAULTS)
def test_form_and_chunk_size(case_name):
    refuse(case_name, r"form.*fastest|fastest.*form", ValueError, form="fastest")
    for size in (0, -16):
        refuse(case_name, "chunk_size", ValueError, form="chunkwise", chunk_size=size)


def test_form_that_the_cell_lacks():
    assert "parallel" not in cells.selective_ssm.forms
    refuse("selective_ssm", "parallel", cells.UnsupportedForm, form="parallel")
    assert issubclass(cells.UnsupportedForm, ValueError)


WRONG_OPTIONS = {
    ("efla", "scale"): (None, "a", 10**400, {}, object(), True + 1j, [1.0], np.ones(3), np.str_("a")),
    ("efla", "order"): (0, -1, 2.0, "2", True),
    ("gated_efla", "variant"): ("decay_last", None, ["published"], jnp.zeros(3)),
    ("linear_attention", "normalize"): ("no", None, 1, jnp.array(True)),
    ("linear_attention", "eps"): ("a", None, float("nan"), float("inf"), -1.0, jnp.float32(1e-6)),
}


@pytest.mark.parametrize(
    ("case_name", "option", "value"),
    [
        pytest.param(*of, value, id=f"{of[1]}-{type(value).__name__}")
        for of, values in WRONG_OPTIONS.items()
        for value in values
    ],
)
def test_option(case_name, option, value):
    """By the call, by `step`, and by `read` where it has the option."""
    match, cell = rf"^{option}( is |=)", harness.cell_of(case_name)
    refuse(case_name, match, ValueError, **{option: value})
    inputs, _, _ = harness.problem(case_name)
    tokens = [inputs[name][:, 0] for name in cell.arguments]
    with pytest.raises(ValueError, match=match):
        cell.step(inputs["initial_state"], *tokens, **{option: value})
    if option not in ("order", "variant"):
        with pytest.raises(ValueError, match=match):
            cell.read(inputs["initial_state"], tokens[0], **{option: value})


@pytest.mark.parametrize("number", [np.int64, np.float32, jnp.float32, jnp.bfloat16])
def test_numbers_of_numpy_and_jax_serve(number):
    inputs, _, _ = harness.problem("efla")
    integer = np.int64(2)
    o, _ = harness.call(
        "efla", inputs, form="chunkwise", scale=number(2), order=integer, chunk_size=8 * integer
    )
    expected, _ = harness.call("efla", inputs, form="chunkwise", scale=2.0, order=2, chunk_size=16)
    np.testing.assert_array_equal(o, expected)


@pytest.mark.parametrize("name", cells.CELLS)
def test_a_cell_shows_how_it_is_called(name):
    assert repr(cells.CELLS[name]) == f"eflax.cells.{name}({', '.join(cells.CELLS[name].arguments)})"


def test_errors_come_under_jit_too():
    inputs, _, _ = harness.problem("efla")
    inputs["beta"] = inputs["beta"][:, :, :2]
    with pytest.raises(ValueError, match=named("beta")):
        jax.jit(lambda inputs: harness.call("efla", inputs))(inputs)


@pytest.mark.parametrize("case_name", QKV)
def test_step_names_the_argument(case_name):
    inputs, _, _ = harness.problem(case_name)
    tokens = {name: inputs[name][:, 0] for name in oracle.CASES[case_name].arguments}
    tokens["v"] = tokens["v"][:, :3]
    with pytest.raises((ValueError, TypeError), match=named("v", "k")):
        harness.cell_of(case_name).step(inputs["initial_state"], *tokens.values())


@pytest.mark.parametrize("case_name", oracle.DEFAULTS)
def test_read_names_the_argument(case_name):
    inputs, _, _ = harness.problem(case_name)
    state, query = inputs["initial_state"], "q" if harness.has_scale(case_name) else "C"
    token, read = inputs[query][:, 0], harness.cell_of(case_name).read
    for wrong in (token[:1], token[..., :-1], token[0], token.astype(jnp.int32), None):
        with pytest.raises((ValueError, TypeError), match=rf"^{query}_t "):
            read(state, wrong)
    for change in (lambda x: x[..., None], lambda x: x.astype(jnp.int32)):
        with pytest.raises((ValueError, TypeError), match=r"^state"):
            read(jax.tree.map(change, state), token)
