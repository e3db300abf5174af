"""The pipeline: plan, write, commit; and the other way, plan and read.

Everything here moves bytes between buffers and a storage. What they mean is known above and below.
"""
