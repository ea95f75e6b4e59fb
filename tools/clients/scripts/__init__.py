"""What is run inside the clients' environments: one file a client, each public function a check."""
