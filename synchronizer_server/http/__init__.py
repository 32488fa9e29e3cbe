"""The status page: plain HTTP beside the gRPC server, for people and machines that look."""
