"""Reading data: recognise it, decode it once into a pack, and say which sample comes when."""
