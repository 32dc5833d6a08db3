"""Convert records to JSON and back to typed values.

The rules, settled once:

| value                      | on the wire                                                                       |
|----------------------------|-----------------------------------------------------------------------------------|
| dataclass, TypedDict       | object by field name; unknown and missing fields are errors                       |
| field marked PRIVATE       | nothing, unless its owner writes it by name; SPARSE: nothing if it is the default |
| pydantic model             | what the model dumps; read back by the model's own rules                          |
| tuple, NamedTuple, list    | array                                                                             |
| set, frozenset             | array in canonical order                                                          |
| enum                       | its value                                                                         |
| datetime, date, time, UUID | text in ISO or canonical form; a time zone is written as its offset               |
| Decimal, timedelta, Path   | text: digits, an ISO 8601 duration, the path                                      |
| int                        | a JSON number of any length Python prints (4,300 digits); read back exactly       |
| keys of objects            | text, ints, enums, UUIDs and dates, written as text                               |
| bytes, NaN, infinities     | text that starts with U+FDD0, a code point reserved for such use; read back       |
| NUL, lone surrogates       | escaped with U+FDD0 inside the text: PostgreSQL, SQLite and UTF-8 accept the rest |
| anything else              | `CodecError` with the path to it; nothing is pickled, nothing is silently dropped |

A union is read as the member that fits: exact scalars first, then the record that has exactly these fields, then the
earliest. Members with the same JSON form cannot be told apart: text beside a date is text, a list beside a tuple is
whichever comes first.

Reading is strict: an int is accepted where a float is asked for, a bool is never a number, text is never parsed
into a number. What is read with no type stays JSON.
"""

from fairtrial.base.codec.decode import decode, from_json
from fairtrial.base.codec.encode import canonical, digest, dumps, to_json
from fairtrial.base.codec.escape import parse_foreign_json, parse_json

__all__ = ["canonical", "decode", "digest", "dumps", "from_json", "parse_foreign_json", "parse_json", "to_json"]
