"""Writers of records as lines of JSON, and as a table."""

import csv
import json
import os

from .._util.files import atomic_write
from .base import Writer, flatten


class JsonlWriter(Writer):
    """Appends each record to a file as a line, a JSON object. For the fields and the arguments see Writer."""

    def write(self, record: dict) -> None:
        with open(self.path_of(record["rank"]), "a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")


class CsvWriter(Writer):
    """Appends each record to a table, as a row.

    The first row names the columns: "step", "ratio", "seconds/select", "residual_norm_ratio/conv1.weight", ... Columns that
    a later record brings are added to the whole file.

    Args:
        path: See Observer.
        every: See Writer.
    """

    def __init__(self, path: str | os.PathLike, every: int = 10):
        super().__init__(path, every)
        self._columns: list[str] = []

    def write(self, record: dict) -> None:
        path, values = self.path_of(record["rank"]), flatten(record)
        if not self._columns and os.path.exists(path):
            self._columns = _read(path)[0]
        missing = [key for key in values if key not in self._columns]
        if missing:
            self._widen(path, missing)
        with open(path, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerow(values)

    def _widen(self, path: str, columns: list[str]) -> None:
        rows = _read(path)[1] if os.path.exists(path) else []
        self._columns = [*self._columns, *columns]
        with atomic_write(path) as part, open(part, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)


def _read(path: str) -> tuple[list[str], list[dict]]:
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        return list(reader.fieldnames or []), rows
