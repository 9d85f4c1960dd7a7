"""The rules every part of kvpool agrees on: identity, layout, page format, errors. Pure: no I/O, no clock."""
