"""Several engines behind one API: replicas on Ray Serve, and a front that forwards requests to them."""
