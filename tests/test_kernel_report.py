"""The report on compiled kernels: its table, and what it finds wrong."""

from dataclasses import replace

from experiments import kernel_launches, kernel_report, kernel_report_tpu, kernel_table


def test_the_table_has_every_kernel_that_is_compiled():
    table = kernel_table.read(kernel_report.TABLE, kernel_report.Row)
    for sizes, variants in kernel_report.SIZES.items():
        for features in variants:
            launched = [name for name, *_ in kernel_report.launches(*sizes, features)]
            assert {row.kernel for row in table if row.key[1:] == (*sizes, features)} >= {*launched} - {
                "solve"
            }
    made = (
        kernel_launches.decode_launches,
        kernel_launches.scan_launches,
        kernel_launches.convolution_launches,
    )
    others = {key for launches in made for key, *_ in launches()}
    assert others <= {row.key for row in table}
    assert all(row.registers > 0 for row in table)


def test_spills_new_and_lost_kernels_are_found():
    first, second, third = kernel_table.read(kernel_report.TABLE, kernel_report.Row)[:3]
    worse = replace(first, spill_stores=first.spill_stores + 8)
    assert kernel_table.compare([first, second], [first, second], "spill_stores") == []
    assert kernel_table.compare([first, second], [worse, second], "spill_stores") == []
    lines = kernel_table.compare([worse, third], [first, second], "spill_stores")
    assert [line.rpartition(") ")[2] for line in lines] == [
        f"has spill_stores {worse.spill_stores}; in the table {first.spill_stores}",
        "is not in the table",
        "is in the table only",
    ]


def test_the_table_of_tpu_kernels_has_every_configuration():
    table = kernel_table.read(kernel_report_tpu.TABLE, kernel_report_tpu.Row)
    assert {row.key for row in table} == {row.key for row in kernel_report_tpu.rows()}
    assert all(row.bundles > 0 and row.vmem > 0 for row in table)
