"""The gRPC services: one module per RPC, translation only."""
