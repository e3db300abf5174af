"""Many snapshots: a run that saves, resumes, and keeps what its policies say."""
