"""One snapshot: saving it, loading it, looking into it."""
