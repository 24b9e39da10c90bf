"""The ways to evaluate the one recurrence of `edits`: same results, different cost."""

from eflax.cells.forms.associative import associative
from eflax.cells.forms.chunkwise import chunkwise
from eflax.cells.forms.edits import Coefficients, Edits, edit_state, read_state, restarts
from eflax.cells.forms.parallel import parallel
from eflax.cells.forms.recurrent import recurrent

EDIT_FORMS = {
    "recurrent": recurrent,
    "associative": associative,
    "parallel": parallel,
    "chunkwise": chunkwise,
}

__all__ = ["EDIT_FORMS", "Coefficients", "Edits", "edit_state", "read_state", "restarts"]
