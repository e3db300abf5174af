"""Between torch and the format: what a state is made of, and how a target is filled again.

This is the only layer that knows torch. Going down, a state becomes value nodes and pieces of
bytes; going up, nodes and pieces become the target's content.
"""
