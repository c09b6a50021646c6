"""Reading data: recognise its format, decode it once into a pack, and order its samples."""
