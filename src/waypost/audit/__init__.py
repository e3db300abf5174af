"""Looking at snapshots without torch: opening their documents, verifying their bytes."""
