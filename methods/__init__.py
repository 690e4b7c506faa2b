"""The methods: one file each, imported as `protofl.methods.<name>`.

A module's method is the one `Method` subclass defined in it whose name in lower case is the file's; a module
without one holds what several methods share.
"""
