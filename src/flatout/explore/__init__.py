"""Understanding data: looking at it before training, and finding wrong labels."""
