"""module → ONNX graphs → verified bundle."""
