"""Models exported to SavedModel and ONNX."""
