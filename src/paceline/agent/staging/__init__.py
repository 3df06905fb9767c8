"""Data on its way to a node's own disk, and results on their way back. Asked for by `[data]`; nothing happens without.

wish -> manifest -> copying (packs, ahead) -> folders (private, swept) -> collecting; `node_staging` is what a agent
calls.
"""
