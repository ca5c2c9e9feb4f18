"""Models for others to serve: SavedModel and ONNX."""
