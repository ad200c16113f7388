"""Malformed files: each row is read or has a fault with its line, or one line refuses the file."""

import pytest

from lean_finetune.core.errors import UserError
from tests.data.read.common import rows_of
from tests.data.read.malformed import MALFORMED


@pytest.mark.parametrize("case", MALFORMED.values(), ids=MALFORMED)
def test_malformed_file_gives_rows_and_faults_or_one_line(tmp_path, case):
    content = case.bytes()
    path = tmp_path / case.file
    path.write_bytes(content)
    for block_bytes in (1 << 20, max(7, len(content) // 1000)):
        if case.error:
            with pytest.raises(UserError) as refusal:
                rows_of(path, block_bytes=block_bytes)
            assert str(refusal.value).startswith(f"{path}{case.error}")
            assert "\n" not in str(refusal.value)
            continue
        rows = rows_of(path, block_bytes=block_bytes)
        found = {row.line: row.fault for row in rows if row.fault is not None}
        assert found.keys() == case.faults.keys()
        for line, fault in case.faults.items():
            assert found[line].startswith(fault) and "\n" not in found[line]
        assert len([row for row in rows if row.value is not None]) == case.good == len(rows) - len(case.faults)
        numbers = [row.number for row in rows]
        assert numbers == sorted(set(numbers))
