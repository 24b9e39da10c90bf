"""The report on compiled kernels: its table, and what it finds wrong."""

from dataclasses import replace

from experiments import kernel_launches, kernel_report


def test_the_table_has_every_kernel_that_is_compiled():
    table = kernel_report.read(kernel_report.TABLE)
    for sizes, variants in kernel_report.SIZES.items():
        for features in variants:
            launched = [name for name, *_ in kernel_report.launches(*sizes, features)]
            assert {row.kernel for row in table if row.key[1:] == (*sizes, features)} >= {*launched} - {
                "solve"
            }
    others = {key for key, *_ in (*kernel_launches.decode_launches(), *kernel_launches.scan_launches())}
    assert others <= {row.key for row in table}
    assert all(row.registers > 0 for row in table)


def test_spills_new_and_lost_kernels_are_found():
    first, second, third = kernel_report.read(kernel_report.TABLE)[:3]
    worse = replace(first, spill_stores=first.spill_stores + 8)
    assert kernel_report.compare([first, second], [first, second]) == []
    assert kernel_report.compare([first, second], [worse, second]) == []
    lines = kernel_report.compare([worse, third], [first, second])
    assert [line.rpartition(") ")[2] for line in lines] == [
        f"spills {worse.spill_stores} bytes; in the table {first.spill_stores}",
        "is not in the table",
        "is in the table only",
    ]
