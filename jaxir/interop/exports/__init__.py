"""Exports models to SavedModel and ONNX."""
