"""Which engines serve a request, and when. Pure: no I/O, the clock's time is passed in."""
