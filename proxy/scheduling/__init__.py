"""Which endpoints serve a request: filter, score, pick. Pure: no I/O, no clock."""
