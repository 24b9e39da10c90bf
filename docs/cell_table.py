"""The README's table of cells, forms and platforms, from the registry: `python docs/cell_table.py` renews it."""

from pathlib import Path

from eflax.cells import CELLS

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- platforms -->\n", "<!-- end platforms -->"
KERNELS = {"pallas_gpu": "Hopper GPUs", "pallas_tpu": "TPUs"}  # of forms that do not run everywhere


def table() -> str:
    """Return the table in Markdown: a row for each cell, a column for each form, and where it runs."""
    forms = list(dict.fromkeys(form for cell in CELLS.values() for form in cell.forms))

    def row(entries: list[str]) -> str:
        return f"| {' | '.join(entries)} |\n"

    lines = row(["cell", *(f"`{form}`" for form in forms)]) + row(["---"] * (len(forms) + 1))
    for name, cell in CELLS.items():
        lines += row(
            [f"`{name}`", *(KERNELS.get(form, "all") if form in cell.forms else "–" for form in forms)]
        )
    return lines


def renewed(text: str) -> str:
    """Return the README's text with the table in its place."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    README.write_text(renewed(README.read_text()))
