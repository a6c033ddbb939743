"""The wire format of the gRPC API: the `.proto` files and what `make proto` generates from them."""
