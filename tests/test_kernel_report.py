"""The report on compiled kernels: its table, and what it finds wrong."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from experiments import kernel_launches, kernel_report, kernel_report_tpu, kernel_table, kernel_times


def test_the_table_has_every_kernel_that_is_compiled():
    table = kernel_table.read(kernel_report.TABLE, kernel_report.Row)
    keys = [key for key, *_ in kernel_launches.all_launches()]
    assert len(keys) == len(set(keys)) and set(keys) == {row.key for row in table}
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


def test_times_count_bytes_and_products(capsys):
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    row = kernel_times.measure(("decode", 1, 1, ""), lambda s, x: (s + x, x), (x, x), 1e9, 1e12, 1)
    assert row.ms > 0 and row.tflop_per_s == 0
    assert abs(row.share_of_copy * row.ms / 1e3 * 1e9 / (4 * 4 * 64 * 64) - 1) < 0.05
    tokens = 8 * 4096 * 16
    key = 128, 128, "erases decays"
    assert kernel_times.multiplications(("forward", *key)) == tokens * (6 * 128**2 + 6 * 64 * 128)
    assert kernel_times.multiplications(("scan_forward", *key)) == 0
    assert kernel_times.main(kernel_times.Flags()) == 2
    assert "the kernels need a Hopper GPU" in capsys.readouterr().err
