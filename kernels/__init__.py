"""The operations of the model. `api` is the contract, `numpy` its definition; a backend imports no service and no gRPC."""
