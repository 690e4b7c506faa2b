"""How client programs are answered: one after the other (`loop`, the definition), the same with its step recorded on a GPU
(`graphs`), or many in one call (`batched`).

`workers` spreads whole cells over processes, `cluster` over machines. Imports nothing here: workers are started before
torch is needed.
"""
