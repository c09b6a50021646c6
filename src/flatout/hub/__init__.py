"""Publishing a run on the Hugging Face hub."""
