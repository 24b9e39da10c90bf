"""The frame of every recurrent token mixer: checks, state, documents, short convolution, cell."""

from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eflax.cells.checks import UnsupportedForm, check_count, check_form
from eflax.cells.forms import pallas
from eflax.layers.convolution import ShortConvolution
from eflax.layers.state import MixerState, check_call, number_documents, restart


class RecurrentMixer(nnx.Module):
    """A token mixer around one cell, ``layer(x, state=None, segment_ids=None) -> (y, state)``.

    The frame carries the state from call to call and restarts it where a new document starts. A subclass sets
    the attributes below and says how x becomes the stream that the convolution and the cell work on
    (``stream``), what the cell takes from it (``arguments``) and how its outputs become y (``output``).
    """

    cell: ClassVar[Any]

    width: int
    stream_width: int
    convolution: ShortConvolution | None
    form: str | None
    chunk_size: int
    dtype: Any

    def set_form(self, form: str | None, chunk_size: int) -> None:
        """Set how the cell is evaluated, or raise ValueError where it has no such form.

        Whether the form serves the device and the inputs is asked when the layer is called, not before: a layer may be
        built, given parameters and traced on a machine that cannot run it.
        """
        check_form(self.cell.name, form, self.cell.forms)
        check_count("chunk_size", chunk_size)
        self.form, self.chunk_size = form, chunk_size

    def form_for(self, x: Float[Array, "B T D"]) -> str | None:
        """Return the form of the cell for such an input; None leaves it to the cell."""
        del x
        return self.form

    def stream(self, x: Float[Array, "B T D"]) -> Float[Array, "B T S"]:
        """Project x to the channels of the short convolution."""
        raise NotImplementedError

    def arguments(self, x: Float[Array, "B T D"], stream: Float[Array, "B T S"]) -> dict[str, Array]:
        """Return the arguments of the cell by name; ``stream`` comes out of the convolution."""
        raise NotImplementedError

    def output(
        self, x: Float[Array, "B T D"], stream: Float[Array, "B T S"], o: Float[Array, "B T *V"]
    ) -> Float[Array, "B T D"]:
        """Turn the outputs o of the cell into those of the layer."""
        raise NotImplementedError

    def cell_options(self) -> dict[str, Any]:
        """Return further keyword arguments of the cell."""
        return {}

    def init_recurrent(self, batch_size: int) -> Array | tuple[Array, ...]:
        """Return the initial state of the cell."""
        raise NotImplementedError

    def init_state(self, batch_size: int) -> MixerState:
        """Return the state before the first token: zeros."""
        tail = None if self.convolution is None else self.convolution.init_tail(batch_size, self.dtype)
        return MixerState(self.init_recurrent(batch_size), tail, jnp.zeros(batch_size, jnp.int32))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        state: MixerState | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], MixerState]:
        """Mix the tokens of x.

        Args:
            x: the input, any T ≥ 0; it is rounded to the compute dtype of the layer.
            state: what an earlier call returned, to continue from there; None starts from zero.
            segment_ids: the document of each token; nothing passes from one to the next. None: one document,
                that of ``state``.

        Returns:
            The output, in the compute dtype, and the state after the last token.

        Raises:
            UnsupportedForm: the form that the layer was built with cannot serve this device or these inputs.
        """
        check_call(self, x, state, segment_ids)
        if state is None:
            state = self.init_state(x.shape[0])
        x = x.astype(self.dtype)
        if x.shape[1] == 0:
            return x, state
        documents, segment = number_documents(state.segment, segment_ids)
        stream, tail = self.stream(x), None
        if self.convolution is not None:
            kernels = self.form is None or self.form in pallas.EDIT_KERNELS
            stream, tail = self.convolution(stream, state.tail, documents, kernels)
        try:
            o, recurrent = self.cell(
                **self.arguments(x, stream),
                **self.cell_options(),
                initial_state=restart(state.recurrent, documents),
                segment_ids=documents,
                form=self.form_for(x),
                chunk_size=self.chunk_size,
            )
        except UnsupportedForm as error:
            way_out = f"build the layer with another form or dtype, or set_form(None, {self.chunk_size})"
            raise UnsupportedForm(f"{type(self).__name__}'s argument {error}; {way_out}") from error
        return self.output(x, stream, o), MixerState(recurrent, tail, segment)
