"""Published MAD scores, in %, to stand beside one's own: by source, then layer, of the six tasks in the order of TASKS.

The EFLA paper (arXiv 2512.12602, Figure 3) does not tell its depth, difficulties or training; its DeltaNet is far below
that of the DeltaNet paper (arXiv 2406.06484) on fuzzy recall and memorization, so the two columns are not one
measurement. Both are single runs. The rows of the DeltaNet paper but for DeltaNet are transcribed at second hand.
"""

from eflax.data.mad_tasks import TASKS

# Compression, fuzzy recall, in-context recall, memorization, noisy recall, selective copying.
PUBLISHED: dict[str, dict[str, tuple[float, ...]]] = {
    "EFLA paper": {
        "deltanet": (42.7, 22.2, 99.9, 29.9, 99.9, 99.6),
        "efla": (43.8, 22.6, 100.0, 32.5, 100.0, 99.8),
    },
    "DeltaNet paper": {
        "deltanet": (42.2, 35.7, 100.0, 52.8, 100.0, 100.0),
        "transformer": (51.6, 29.8, 94.1, 85.2, 86.8, 99.6),
        "mamba": (52.7, 6.7, 90.4, 89.5, 90.1, 86.3),
    },
}


def published(task: str, layer: str) -> dict[str, float]:
    """Return the published accuracies of a layer at a task, in 0..1, by their source."""
    place = list(TASKS).index(task)
    return {source: rows[layer][place] / 100 for source, rows in PUBLISHED.items() if layer in rows}
