"""How client programs are answered: one after the other (`loop`, the definition) or many in one call (`batched`).

`workers` spreads whole cells over processes, `cluster` over machines. Imports nothing here: workers are started before
torch is needed.
"""
