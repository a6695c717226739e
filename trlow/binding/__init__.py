"""This floor looks like C: libraries, prototypes and codes with the names that C gives them.

Use it alone if you like: `nccl.load()` gives a library whose attributes are checked C functions.
"""
