"""Several engines behind one API: replicas on Ray Serve, and the front that forwards requests to them."""
