"""`trlow bench`: NCCL's collectives measured on raw buffers, beside the training path.

What is asked (request, variant) and what is expected (collectives, exact) is arithmetic. A worker
process per variant owns devices and NCCL (crew, calls, timing, checking); the command line's own
process only asks them in turn (process, sweep) and shows what came back (result, table, plot).
"""
