"""KV events: engines say over ZMQ which blocks they store and remove; followers keep the block index true."""
