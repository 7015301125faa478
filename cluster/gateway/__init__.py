"""The gateway: from a gRPC call to workers and back."""
