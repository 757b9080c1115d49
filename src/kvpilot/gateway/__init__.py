"""The proxy agents talk to: parse, identify, forward; everything else happens beside the request."""
