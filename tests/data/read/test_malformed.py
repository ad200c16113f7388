"""Each row of a file is used or has a fault with its line, or one line says why the file cannot be read."""

import pytest

from lean_finetune.core.errors import UserError
from tests.data.read.common import rows_of
from tests.data.read.malformed import MALFORMED


def test_the_corpus_is_as_large_as_promised():
    assert len(MALFORMED) >= 60


@pytest.mark.parametrize("case", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("is_cut_finely", [False, True])
def test_each_ends_in_rows_in_faults_with_lines_or_in_one_line(tmp_path, case, is_cut_finely):
    content = case.bytes()
    block_bytes = max(7, len(content) // 1000) if is_cut_finely else 1 << 20
    path = tmp_path / case.file
    path.write_bytes(content)
    if case.error:
        with pytest.raises(UserError) as told:
            rows_of(path, block_bytes=block_bytes)
        assert str(told.value).startswith(f"{path}{case.error}")
        assert "\n" not in str(told.value)
        return
    rows = rows_of(path, block_bytes=block_bytes)
    found = {row.line: row.fault for row in rows if row.fault is not None}
    assert found.keys() == case.faults.keys()
    for line, fault in case.faults.items():
        assert found[line].startswith(fault) and "\n" not in found[line]
    assert len([row for row in rows if row.value is not None]) == case.good
    assert len(rows) == case.good + len(case.faults)
    assert all((row.value is None) != (row.fault is None) for row in rows)
    numbers = [row.number for row in rows]
    assert numbers == sorted(set(numbers))
